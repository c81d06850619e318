"""Which transport a group uses: agreed by all of its ranks, before any of them trains."""

import logging
from collections.abc import Collection, Sequence

import torch

from paceline.collectives.api import Transport
from paceline.collectives.shm.meet import Door, connect, introduce, next_meeting
from paceline.collectives.shm.presence import Presence, Refusal, hosts, share_host
from paceline.collectives.shm.transport import ShmTransport
from paceline.collectives.torch_dist import TorchDistTransport, store_of
from paceline.collectives.two_level import TwoLevelTransport, form_channel
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
            return base.apart(timeout_s, devices).connect()
        why = "this group has one rank" if base.size == 1 else "torch knows no store for this group to meet through"
        raise _cannot(wanted, why)
    return _Choice(base, wanted, devices).make(timeout_s)


class _Choice:
    """What one group agrees on. Every step is taken by all ranks, from what all ranks know."""

    def __init__(self, base: TorchDistTransport, wanted: str, devices: Collection[torch.device]) -> None:
        self._base = base
        self._wanted = wanted
        self._devices = devices
        self._wish = f"{wanted} {'cpu' if all(device.type == 'cpu' for device in devices) else 'device'}"

    def make(self, timeout_s: float | None) -> Transport:
        flat = self._base.apart(timeout_s, self._devices)
        watch, store = flat.watch, store_of(self._base.group)
        assert isinstance(watch, StoreWatch)
        assert store is not None
        rank, size = self._base.rank, self._base.size
        place = next_meeting(store, rank)
        with Door(rank, self._wish) as door:
            everyone = introduce(place, door.presence, size, watch=watch, timeout_s=timeout_s)
            _check_wishes(everyone)
            groups = hosts(everyone)
            refusal = self._refusal(everyone, groups)
            if refusal is not None:
                return self._without(refusal, groups, flat)
            here = next([everyone[peer] for peer in ranks] for ranks in groups if rank in ranks)
            mesh = connect(place, door, everyone, here, watch=watch, timeout_s=timeout_s)
        if isinstance(mesh, Refusal):
            return self._without(mesh, groups, flat)
        if len(groups) == 1:
            return ShmTransport(mesh, watch=watch, fallback=flat, store=store)
        try:
            channel = form_channel(place, self._base, groups, watch=watch, timeout_s=timeout_s)
        except BaseException:
            mesh.close()
            raise
        if isinstance(channel, Refusal):
            mesh.close()
            return self._without(channel, groups, flat)
        return TwoLevelTransport(mesh, channel, flat, groups, watch=watch, again=self.make)

    def _refusal(self, everyone: Sequence[Presence], groups: Sequence[Sequence[int]]) -> Refusal | None:
        """Why nobody shares memory. An empty reason is not worth a line."""
        if self._wanted == "torch":
            return Refusal("")
        for one in everyone:
            if not one.wish.endswith("cpu"):
                return Refusal("" if self._wanted == "auto" else f"rank {one.rank} has parameters outside the CPU")
        unable = [one for one in everyone if one.cannot]
        if len(groups) == 1 and self._wanted == "two-level":
            return Refusal("all ranks run on one host")
        if unable or len(groups) == 1 or self._wanted == "shm" or max(map(len, groups)) == 1:
            return share_host(everyone)
        return None

    def _without(self, refusal: Refusal, groups: Sequence[Sequence[int]], flat: TorchDistTransport) -> Transport:
        """torch.distributed, with one line in the log of one rank; an error if something else was asked for by name."""
        if self._wanted not in ("auto", "torch"):
            raise _cannot(self._wanted, refusal.reason)
        if refusal.reason and flat.rank == 0:
            level = logging.INFO if max(map(len, groups)) == 1 else logging.WARNING
            logger.log(level, "transport: torch.distributed, since ranks do not share memory: %s", refusal.reason)
        return flat.connect()


def _check_wishes(everyone: Sequence[Presence]) -> None:
    wishes = [one.wish.partition(" ")[0] for one in everyone]
    if len(set(wishes)) > 1:
        told = "; ".join(f"rank {one.rank} transport={wish!r}" for one, wish in zip(everyone, wishes, strict=True))
        raise UsageError(f"every rank must pass the same transport=, got: {told}")


def _cannot(wanted: str, why: str) -> UsageError:
    return UsageError(f"transport={wanted!r} cannot work here: {why}; use transport='auto'")
