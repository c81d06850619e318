"""`init`, `shutdown` and `get`: all they know is read from torch.distributed and the environment."""

import math
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from paceline.collectives.peers import post_end
from paceline.errors import IllegalMove, UsageError, WorldNotFormed
from paceline.member import in_elastic_job
from paceline.progress import own_progress
from paceline.start.bound_store import gloo_on_loopback, is_loopback
from paceline.start.elastic_world import check_formed, elastic_world
from paceline.start.forming import default_backend, form_group
from paceline.start.rendezvous import rendezvous
from paceline.world import World

LEAVE_S = 2.0  # how long rank 0 waits for the others to leave
NAMES = ("ws", "rank", "grank", "lrank", "pg")


def init(
    *,
    backend: str | None = None,
    timeout: float = 30.0,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    device: torch.device | str | None = None,
) -> World:
    """Form the world and return this process's place in it.

    Everything is read from the launcher's environment; an argument wins over a variable. With no launcher it is a
    world of one. The device is CUDA device number `local_rank` if there is one (it becomes the current device),
    else the CPU; `device="cuda"` asks for the same one. The backend is gloo for CPU tensors and, on a CUDA device, NCCL
    for CUDA tensors.

    Raises `WorldNotFormed` with the missing ranks when some do not arrive within `timeout` seconds. Calling it again
    returns the world that is already there.

    In an elastic job nothing is formed here: `paceline.Elastic` does it, for each generation, and the world that is
    returned follows it. Its device does not change.
    """
    _check_arguments(backend, timeout)
    if in_elastic_job():
        world = elastic_world(
            _given_device(device),
            backend=backend,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            master_addr=master_addr,
            master_port=master_port,
        )
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)
        return world
    formed = dist.is_initialized()
    if formed:
        _refuse_contradiction(rank, world_size, backend)
        world = _formed_world(local_rank)
    else:
        world = World.from_env(
            rank=rank, world_size=world_size, local_rank=local_rank, master_addr=master_addr, master_port=master_port
        )
    chosen = _given_device(device) or world.device
    if not formed:
        # All arguments are checked: from now on other ranks may wait for this one.
        _form(world, backend or default_backend(chosen), timeout, chosen)
        own_progress().note_end(lambda: not dist.is_initialized())
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return replace(world, device_name=str(chosen))


def shutdown() -> None:
    """Leave the world: destroy all process groups. Does nothing when there are none."""
    if dist.is_initialized():
        _leave_store()
        dist.destroy_process_group()


def _leave_store() -> None:
    """Let rank 0, whose process runs the store, leave last: others may still be reading from it."""
    store = dist.distributed_c10d._get_default_store()
    deadline = time.monotonic() + LEAVE_S
    try:
        post_end(store, dist.get_rank(), dist.get_world_size())
        left = store.add("paceline left", 1)
        while dist.get_rank() == 0 and left < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.002)
            left = store.add("paceline left", 0)
    except (RuntimeError, ValueError):  # the store has ended, or cannot count: no rank waits there
        return


def get(name: str, group: dist.ProcessGroup | None = None) -> "int | dist.ProcessGroup":
    """Answer one question about the world by its short name.

    `"ws"` world size, `"rank"` rank, `"grank"` global rank, `"lrank"` rank on this machine, `"pg"` the process group.
    `group` asks about a group other than the default one. Before `init`, the environment answers all but `"pg"`.
    """
    if name not in NAMES:
        raise UsageError(f"get({name!r}) is not known: expected one of {', '.join(map(repr, NAMES))}")
    if in_elastic_job():
        check_formed(f"answer to get({name!r})")
    if not dist.is_initialized():
        if name == "pg" or group is not None:
            raise IllegalMove(f"get({name!r}) needs a process group and there is none: call paceline.init() first")
        world = World.from_env()
        return {"ws": world.size, "rank": world.rank, "grank": world.rank, "lrank": world.local_rank}[name]
    if name == "ws":
        return dist.get_world_size(group)
    if name == "rank":
        return dist.get_rank(group)
    if name == "grank":
        return dist.get_rank()
    if name == "lrank":
        return elastic_world(None).local_rank if in_elastic_job() else _formed_world().local_rank
    default = dist.group.WORLD
    assert default is not None, "torch.distributed says that it is initialised"
    return default if group is None else group


def _check_arguments(backend: str | None, timeout: float) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not math.isfinite(timeout) or timeout <= 0:
        raise UsageError(f"timeout must be a number of seconds above 0, got {timeout!r}")
    if backend is None:
        return
    known = sorted(dist.Backend.backend_list)
    for part in str(backend).lower().split(","):
        if part.rpartition(":")[2] not in known:
            raise UsageError(f"backend={backend!r} is not known: expected one of {', '.join(known)}, or device:backend")


def _given_device(device: torch.device | str | None) -> torch.device | None:
    """The device that a script asks for. None, and "cuda" without a number: this rank's own."""
    if device is None:
        return None
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device={device!r} is not a device: expected for instance 'cpu' or 'cuda:0'") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device={device!r} was asked for, but torch sees no CUDA device here; expected 'cpu' or None")
    return None if chosen.type == "cuda" and chosen.index is None else chosen


def _form(world: World, backend: str, timeout: float, device: torch.device) -> None:
    started = time.monotonic()
    store = rendezvous(world, timeout)
    # gloo connects inside the constructor and cannot be interrupted there; a rank that dies after it announced itself
    # must not hold the others longer than their timeout.
    left = max(1.0, timeout - (time.monotonic() - started))
    try:
        with gloo_on_loopback(is_loopback(world.master_addr)):
            form_group(store, world.rank, world.size, backend, device, left)
    except (RuntimeError, ValueError) as error:
        raise WorldNotFormed(
            f"rank {world.rank}: all {world.size} ranks arrived, but the {backend!r} group could not connect "
            f"within {left:.0f} s: {error}; check whether a rank died meanwhile, and whether ranks can reach each other"
        ) from error


def _formed_world(local_rank: int | None = None) -> World:
    """The world of the existing process group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World.from_env(local_rank=local_rank)
    if (world.rank, world.size) != (rank, size):
        world = replace(World.from_env(rank=rank, world_size=size, local_rank=local_rank), source="torch.distributed")
    return world


def _refuse_contradiction(rank: int | None, world_size: int | None, backend: str | None) -> None:
    there = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "backend": dist.get_backend_config()}
    config = None if backend is None else repr(dist.BackendConfig(dist.Backend(backend)))
    for name, asked in (("rank", rank), ("world_size", world_size), ("backend", config)):
        if asked is not None and asked != there[name]:
            raise UsageError(
                f"the world is already formed with {name}={there[name]!r}, got {name}={asked!r}; "
                f"call paceline.shutdown() before forming another"
            )
