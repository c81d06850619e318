"""What `%dist_init` was told, as a wish."""

from paceline.errors import UsageError
from paceline.launch.devices import gpu_count
from paceline.notebook.fleet.placing import Wish

FEW = 2
TRANSPORTS = ("auto", "shm", "torch")
HERE = ("localhost", "127.0.0.1", "::1")


def wish_of(
    *,
    size: int | None,
    gpu_ids: str | None,
    lanes: int | None = None,
    transport: str | None = None,
    backend: str | None = None,
    master_addr: str | None = None,
) -> Wish:
    """Check the options and fill in what was left out: a rank for each GPU that was named or is there, else two."""
    if master_addr is not None and master_addr not in HERE:
        raise UsageError(
            f"--master-addr {master_addr}: the ranks of a notebook are on its own machine; leave the option out, or "
            f"start ranks on several machines with paceline run"
        )
    chosen = None if gpu_ids is None else _numbers(gpu_ids)
    if size is None and chosen is None:
        size = gpu_count() or FEW
    elif size is None:
        size = len(chosen or ()) or FEW
    if size < 1:
        raise UsageError(f"expected --num-processes of at least 1, got {size}")
    if chosen and len(chosen) > size:
        raise UsageError(
            f"expected at most a GPU for each of the {size} ranks, got --gpu-ids {gpu_ids} with {len(chosen)}"
        )
    environment = {}
    if transport is not None:
        if transport not in TRANSPORTS:
            raise UsageError(f"expected --transport {', '.join(TRANSPORTS)}, got {transport}")
        environment["PACELINE_TRANSPORT"] = transport
    if lanes is not None:
        if lanes < size:
            raise UsageError(f"expected at least a lane for each of the {size} ranks, got --lanes {lanes}")
        environment["PACELINE_LANES"] = str(lanes)
    return Wish(size=size, gpu_ids=chosen, backend=backend, environment=environment)


def _numbers(text: str) -> tuple[int, ...]:
    if text.lower() in ("cpu", "none"):
        return ()
    given = text.strip("[]() ").replace(" ", "").split(",")
    if not all(one.isdigit() for one in given):
        raise UsageError(f"expected GPUs as numbers with commas, as in --gpu-ids 1,2, or cpu, got {text!r}")
    return tuple(map(int, given))
