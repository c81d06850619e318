"""Which transport a group uses: agreed by all of its ranks, before any of them trains."""

import logging
from collections.abc import Collection, Sequence

import torch

from paceline.collectives.api import Transport
from paceline.collectives.shm.meet import Door, connect, introduce, next_meeting
from paceline.collectives.shm.presence import Presence, Refusal, hosts, share_host
from paceline.collectives.shm.transport import ShmTransport
from paceline.collectives.torch_dist import TorchDistTransport, store_of
from paceline.collectives.watch import StoreWatch
from paceline.errors import UsageError

logger = logging.getLogger("paceline")

CHOICES = ("auto", "torch", "shm", "two-level")


def choose(
    base: TorchDistTransport, wanted: str, devices: Collection[torch.device], timeout_s: float | None
) -> Transport:
    """The transport for tensors on `devices`, of the kind that is `wanted`. Every rank of the group must call it.

    "auto" takes shared memory where all ranks can, two levels where several hosts hold several ranks each, and
    torch.distributed else. What is wanted and cannot be had is a UsageError on every rank.
    """
    if wanted not in CHOICES:
        raise UsageError(f"transport must be one of {', '.join(map(repr, CHOICES))}, got {wanted!r}")
    store = store_of(base.group)
    if store is None or base.size == 1:
        if wanted in ("auto", "torch"):
            return base.apart(timeout_s)
        why = "this group has one rank" if base.size == 1 else "torch knows no store for this group to meet through"
        raise _cannot(wanted, why)
    fallback = base.apart(timeout_s)
    watch = fallback.watch
    assert isinstance(watch, StoreWatch)
    place = next_meeting(store, base.rank)
    on_cpu = all(device.type == "cpu" for device in devices)
    with Door(base.rank, wish=f"{wanted} {'cpu' if on_cpu else 'device'}") as door:
        everyone = introduce(place, door.presence, base.size, watch=watch, timeout_s=timeout_s)
        refusal = _refusal(everyone, wanted)
        if refusal is not None:
            _say(refusal, everyone, wanted, base.rank)
            return fallback
        mesh = connect(place, door, everyone, everyone, watch=watch, timeout_s=timeout_s)
    if isinstance(mesh, Refusal):
        _say(mesh, everyone, wanted, base.rank)
        return fallback
    return ShmTransport(mesh, watch=watch, fallback=fallback, store=store)


def _refusal(everyone: Sequence[Presence], wanted: str) -> Refusal | None:
    """Why the ranks do not share memory, from what all of them know."""
    wishes = [one.wish.partition(" ")[0] for one in everyone]
    if len(set(wishes)) > 1:
        told = "; ".join(f"rank {one.rank} transport={wish!r}" for one, wish in zip(everyone, wishes, strict=True))
        raise UsageError(f"every rank must pass the same transport=, got: {told}")
    if wanted == "torch":
        return Refusal("")
    for one in everyone:
        if not one.wish.endswith("cpu"):
            return Refusal("" if wanted == "auto" else f"rank {one.rank} has parameters that are not on the CPU")
    return share_host(everyone)


def _say(refusal: Refusal, everyone: Sequence[Presence], wanted: str, rank: int) -> None:
    """Raise if it was asked for by name; else one line in the log of one rank."""
    if wanted not in ("auto", "torch"):
        raise _cannot(wanted, refusal.reason)
    if not refusal.reason or rank != 0:
        return
    able = not any(one.cannot for one in everyone) and len(hosts(everyone)) > 1
    level = logging.INFO if able else logging.WARNING
    logger.log(level, "transport: torch.distributed, since ranks cannot share memory: %s", refusal.reason)


def _cannot(wanted: str, why: str) -> UsageError:
    return UsageError(f"transport={wanted!r} cannot work here: {why}; use transport='auto'")
