"""The options of `%dist_init`, the device of every rank, the backend they share, and their environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import UsageError
from paceline.launch.devices import gpu_count
from paceline.launch.rank_environment import DEFAULTS, SURVIVORS, rendezvous_variables

FEW = 2
TRANSPORTS = ("auto", "shm", "torch")
HERE = ("localhost", "127.0.0.1", "::1")
# Variables by which the process that started the user's kernel described itself to it.
NOT_FOR_RANKS = ("JPY_PARENT_PID", "JPY_INTERRUPT_EVENT", "JPY_SESSION_NAME")


@dataclass(frozen=True)
class StartOptions:
    """The user's options. `gpu_ids` and `backend` are chosen automatically if None; empty `gpu_ids` means the CPU."""

    size: int
    gpu_ids: tuple[int, ...] | None = None
    backend: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RankDevices:
    """One device for every rank. `gpu_ids` is empty on CPUs; `note` is a hint about an unexpected choice."""

    devices: tuple[str, ...]
    gpu_ids: tuple[int, ...]
    visible: str | None  # CUDA_VISIBLE_DEVICES of the ranks, if it differs from this process's own
    backend: str
    note: str = ""


def start_options(
    *,
    size: int | None,
    gpu_ids: str | None,
    lanes: int | None = None,
    transport: str | None = None,
    backend: str | None = None,
    master_addr: str | None = None,
) -> StartOptions:
    """Check the options and fill in what was left out: one rank per named or existing GPU, else two."""
    if master_addr is not None and master_addr not in HERE:
        raise UsageError(
            f"--master-addr {master_addr}: the ranks of a notebook run on its own machine; leave the option out, or "
            f"start ranks on several machines with a launcher"
        )
    chosen = None if gpu_ids is None else _parse_gpu_ids(gpu_ids)
    if size is None:
        size = (gpu_count() if chosen is None else len(chosen)) or FEW
    if chosen and len(chosen) > size:
        raise UsageError(f"expected at most {size} GPUs, one for each rank, got --gpu-ids {gpu_ids} with {len(chosen)}")
    environment = {}
    if transport is not None:
        if transport not in TRANSPORTS:
            raise UsageError(f"expected --transport {', '.join(TRANSPORTS)}, got {transport}")
        environment["PACELINE_TRANSPORT"] = transport
    if lanes is not None:
        if lanes < size:
            raise UsageError(f"expected --lanes of at least {size}, one for each rank, got {lanes}")
        environment["PACELINE_LANES"] = str(lanes)
    return StartOptions(size=size, gpu_ids=chosen, backend=backend, environment=environment)


def _parse_gpu_ids(text: str) -> tuple[int, ...]:
    if text.lower() in ("cpu", "none"):
        return ()
    given = text.strip("[]() ").replace(" ", "").split(",")
    if not all(one.isdigit() for one in given):
        raise UsageError(f"expected GPUs as numbers with commas, as in --gpu-ids 1,2, or cpu, got {text!r}")
    return tuple(map(int, given))


def place_ranks(options: StartOptions) -> RankDevices:
    """Give every rank its device, or refuse before anything is started."""
    size = options.size
    if size < 1:
        raise UsageError(f"expected --num-processes of at least 1, got {size}")
    there = 0 if options.gpu_ids == () else gpu_count()
    if options.gpu_ids:
        _check_gpu_ids(options.gpu_ids, there)
    chosen = tuple(dict.fromkeys(options.gpu_ids or range(min(there, size))))
    if not chosen:
        return RankDevices(("cpu",) * size, (), None, options.backend or "gloo")
    places = [index % len(chosen) for index in range(size)]
    shared = size > len(chosen)
    backend = options.backend or ("gloo" if shared else "cpu:gloo,cuda:nccl")
    note = ""
    if shared:
        note = (
            f"{size} ranks share {len(chosen)} GPU{'s' if len(chosen) > 1 else ''}, so they communicate over {backend}"
        )
        note += "" if options.backend else ", since NCCL needs a GPU for each rank"
    return RankDevices(
        devices=tuple(f"cuda:{place}" for place in places),
        gpu_ids=tuple(chosen[place] for place in places),
        visible=_visible(chosen) if options.gpu_ids else None,
        backend=backend,
        note=note,
    )


def _check_gpu_ids(gpu_ids: tuple[int, ...], there: int) -> None:
    wrong = [number for number in gpu_ids if not 0 <= number < there]
    if wrong:
        have = f"GPUs 0 to {there - 1}" if there > 1 else "only GPU 0" if there else "no GPU"
        raise UsageError(
            f"there is no GPU {', '.join(map(str, wrong))}: this machine has {have}; name some of those, or leave "
            f"--gpu-ids out for {'all of them' if there else 'the CPU'}"
        )


def _visible(chosen: tuple[int, ...]) -> str:
    """CUDA device i of every rank is then the i-th chosen GPU, which is what `paceline.init` expects."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return ",".join(named[number] if number < len(named) else str(number) for number in chosen)


def environment_of(options: StartOptions, chosen: RankDevices, master_port: int, rank: int) -> dict[str, str]:
    """All variables of one rank: those of this process, torchrun's, and paceline's."""
    defaults = {
        **DEFAULTS,
        **SURVIVORS,
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // options.size)),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # otherwise its debugger complains about Python itself
    }
    own = {
        **rendezvous_variables(rank, options.size, master_port),
        "PACELINE_NOTEBOOK_DEVICE": chosen.devices[rank],
        "PACELINE_NOTEBOOK_GPU": str(chosen.gpu_ids[rank]) if chosen.gpu_ids else "",
    }
    visible = {} if chosen.visible is None else {"CUDA_VISIBLE_DEVICES": chosen.visible}
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_FOR_RANKS}
    return {**defaults, **inherited, **own, **visible, **options.environment}
