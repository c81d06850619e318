"""Who sits where: the device of every rank, the backend they share, and the environment that tells them so."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import UsageError
from paceline.launch.devices import gpu_count
from paceline.launch.seat import LOOPBACK, SECRET_NAME

# What the user's own kernel was told about itself by the one who started it.
NOT_FOR_RANKS = (SECRET_NAME, "JPY_PARENT_PID", "JPY_INTERRUPT_EVENT", "JPY_SESSION_NAME")


@dataclass(frozen=True)
class Wish:
    """What the user asked for. `gpu_ids` and `backend` are chosen when they are None; no gpu ids at all is the CPU."""

    size: int
    gpu_ids: tuple[int, ...] | None = None
    backend: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Seating:
    """One device for every rank. `gpu_ids` is empty on CPUs; `note` says what the user may not expect."""

    devices: tuple[str, ...]
    gpu_ids: tuple[int, ...]
    visible: str | None  # CUDA_VISIBLE_DEVICES of the ranks, where it is not this process's own
    backend: str
    note: str = ""


def seat(wish: Wish) -> Seating:
    """Give every rank its device, or refuse before anything is started."""
    if type(wish.size) is not int or wish.size < 1:
        raise UsageError(f"the number of processes must be a whole number of at least 1, got {wish.size!r}")
    there = 0 if wish.gpu_ids == () else gpu_count()
    if wish.gpu_ids:
        _check(wish.gpu_ids, there)
        chosen = tuple(dict.fromkeys(wish.gpu_ids))
    else:
        chosen = tuple(range(min(there, wish.size)))
    if not chosen:
        return Seating(("cpu",) * wish.size, (), None, wish.backend or "gloo")
    places = [index % len(chosen) for index in range(wish.size)]
    shared = wish.size > len(chosen)
    backend = wish.backend or ("gloo" if shared else "cpu:gloo,cuda:nccl")
    note = ""
    if shared:
        note = f"{wish.size} ranks share {len(chosen)} GPU{'s' if len(chosen) > 1 else ''}, so they talk over {backend}"
        note += "" if wish.backend else ", since NCCL wants a GPU for each rank"
    return Seating(
        devices=tuple(f"cuda:{place}" for place in places),
        gpu_ids=tuple(chosen[place] for place in places),
        visible=_visible(chosen) if wish.gpu_ids else None,
        backend=backend,
        note=note,
    )


def _check(gpu_ids: tuple[int, ...], there: int) -> None:
    wrong = [number for number in gpu_ids if not 0 <= number < there]
    if wrong:
        have = f"GPUs 0 to {there - 1}" if there > 1 else "GPU 0 alone" if there else "no GPU"
        raise UsageError(
            f"there is no GPU {', '.join(map(str, wrong))}: this machine shows {have}; "
            f"expected gpu ids among those, or none for {'all of them' if there else 'the CPU'}"
        )


def _visible(chosen: tuple[int, ...]) -> str:
    """CUDA device i of every rank is then the i-th chosen GPU, which is what `paceline.init` expects."""
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return ",".join(named[number] if number < len(named) else str(number) for number in chosen)


def environment_of(rank: int, wish: Wish, seating: Seating, master_port: int) -> dict[str, str]:
    """All variables of one rank: those of this process, torchrun's, and ours."""
    found = {name: value for name, value in os.environ.items() if name not in NOT_FOR_RANKS}
    threads = max(1, len(os.sched_getaffinity(0)) // wish.size)
    for name, value in {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # else its debugger complains about Python itself
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }.items():
        found.setdefault(name, value)
    found.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(wish.size),
        LOCAL_WORLD_SIZE=str(wish.size),
        GROUP_RANK="0",
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(master_port),
        PACELINE_NOTEBOOK_DEVICE=seating.devices[rank],
        PACELINE_NOTEBOOK_GPU=str(seating.gpu_ids[rank]) if seating.gpu_ids else "",
    )
    if seating.visible is not None:
        found["CUDA_VISIBLE_DEVICES"] = seating.visible
    found.update(wish.environment)
    return found
