"""The choice of a group's transport, agreed by all of its ranks before training."""

import logging
from collections.abc import Collection, Sequence

import torch

from paceline.collectives.protocols import Transport
from paceline.collectives.shm.connect import PeerInfo, PeerListener, check_share_host, connect, hosts
from paceline.collectives.shm.transport import ShmTransport
from paceline.collectives.store_gather import NoSharedMemory, Rendezvous
from paceline.collectives.torch_dist import TorchDistTransport
from paceline.collectives.torch_store import store_of
from paceline.collectives.two_level import TwoLevelTransport, form_channel
from paceline.errors import UsageError

logger = logging.getLogger("paceline")

CHOICES = ("auto", "torch", "shm", "two-level")


def choose(
    base: TorchDistTransport, wanted: str, devices: Collection[torch.device], timeout_s: float | None
) -> Transport:
    """The transport for tensors on `devices`, of the kind that is `wanted`. Every rank of the group must call it.

    "auto" takes shared memory where all ranks can, two levels where several hosts hold several ranks each, and
    torch.distributed otherwise. A transport that is requested by name but unavailable is a UsageError on every rank.
    """
    if wanted not in CHOICES:
        raise UsageError(f"transport must be one of {', '.join(map(repr, CHOICES))}, got {wanted!r}")
    store = store_of(base.users_group)
    if store is None or base.size == 1:
        if wanted in ("auto", "torch"):
            return base.dup(timeout_s, devices).connect()
        why = "this group has one rank" if base.size == 1 else "its process group has no store to find other ranks with"
        raise _cannot(wanted, why)
    return _Choice(base, wanted, devices).make(timeout_s)


class _Choice:
    """The agreement of one group. All ranks take every step, from the same information."""

    def __init__(self, base: TorchDistTransport, wanted: str, devices: Collection[torch.device]) -> None:
        self._base = base
        self._wanted = wanted
        self._devices = devices
        self._requested = f"{wanted} {'cpu' if all(device.type == 'cpu' for device in devices) else 'device'}"

    def make(self, timeout_s: float | None) -> Transport:
        base, store = self._base, store_of(self._base.users_group)
        assert store is not None
        flat = base.dup(timeout_s, self._devices)
        rendezvous = Rendezvous.next(store, base.rank, base.size, flat.watch, timeout_s)
        with PeerListener(base.rank, self._requested) as listener:
            told = rendezvous.gather("peer info", listener.own.encode())
            everyone = [PeerInfo.decode(text, rank) for rank, text in enumerate(told)]
            _check_requests(everyone)
            groups = hosts(everyone)
            try:
                self._check_memory(everyone, groups)
                here = next([everyone[peer] for peer in ranks] for ranks in groups if base.rank in ranks)
                mesh = connect(rendezvous, listener, here)
                try:
                    if len(groups) == 1:
                        return ShmTransport(mesh, watch=flat.watch, fallback=flat, again=self.make)
                    return TwoLevelTransport(mesh, form_channel(rendezvous, base, groups), flat, groups, self.make)
                except BaseException:
                    mesh.close()
                    raise
            except NoSharedMemory as refusal:
                return self._without(str(refusal), groups, flat)

    def _check_memory(self, everyone: Sequence[PeerInfo], groups: Sequence[Sequence[int]]) -> None:
        """Raise NoSharedMemory if no ranks share memory. An empty reason is not logged."""
        if self._wanted == "torch":
            raise NoSharedMemory("")
        for one in everyone:
            if not one.requested.endswith("cpu"):
                raise NoSharedMemory(
                    "" if self._wanted == "auto" else f"rank {one.rank} has parameters that are not on the CPU"
                )
        if len(groups) == 1 and self._wanted == "two-level":
            raise NoSharedMemory("all ranks run on one host")
        unable = any(one.cannot for one in everyone)
        if unable or len(groups) == 1 or self._wanted == "shm" or max(map(len, groups)) == 1:
            check_share_host(everyone)

    def _without(self, reason: str, groups: Sequence[Sequence[int]], flat: TorchDistTransport) -> Transport:
        """torch.distributed, with one line in the log of one rank; an error if another transport was requested by
        name."""
        if self._wanted not in ("auto", "torch"):
            raise _cannot(self._wanted, reason) from None
        if reason and flat.rank == 0:
            level = logging.INFO if max(map(len, groups)) == 1 else logging.WARNING
            logger.log(level, "transport: torch.distributed, since ranks do not share memory: %s", reason)
        return flat.connect()


def _check_requests(everyone: Sequence[PeerInfo]) -> None:
    requests = [one.requested.partition(" ")[0] for one in everyone]
    if len(set(requests)) > 1:
        told = "; ".join(
            f"rank {one.rank} transport={requested!r}" for one, requested in zip(everyone, requests, strict=True)
        )
        raise UsageError(f"every rank must pass the same transport=, got: {told}")


def _cannot(wanted: str, why: str) -> UsageError:
    return UsageError(f"transport={wanted!r} cannot work here: {why}; use transport='auto'")
