"""A rank's part in one collective, prepared from the calls of all ranks, once, because buckets recur in every step."""

import struct
from collections.abc import Sequence

import torch

from paceline.collectives.protocols import mismatch
from paceline.collectives.shm import codes
from paceline.collectives.shm.arenas import NOWHERE, Arenas
from paceline.collectives.shm.codes import CodedCall
from paceline.collectives.shm.mesh import Mesh
from paceline.collectives.shm.summing import Summing, new_scratch
from paceline.errors import CollectiveMismatch

Sources = list[torch.Tensor]  # what is read from each rank

CACHE_LINE = 64  # bytes; ranks write to different cache lines
KEPT = 512
_CALL = struct.Struct("=4q")  # code, number of elements, arena, offset


class Preparation:
    """Prepares the collectives of one rank, and remembers them in `known` by the calls of all ranks."""

    def __init__(self, mesh: Mesh, arenas: Arenas, owners: int, divide_by: int) -> None:
        self.known: dict[bytes, Summing | Sources] = {}
        self._mesh = mesh
        self._arenas = arenas
        self._owners = owners
        self._divide_by = divide_by
        self._scratch = new_scratch()

    def prepare(self, calls: Sequence[bytes], key: bytes) -> Summing | Sources | CollectiveMismatch:
        """The work of a collective with these calls, or the error if they differ."""
        mesh, said = self._mesh, [CodedCall(*_CALL.unpack(call)[:2]) for call in calls]
        if len(set(said)) > 1:
            called = {f"rank {rank}": call for rank, call in zip(mesh.ranks, said, strict=True)}
            return CollectiveMismatch(mismatch(called), ranks=mesh.ranks)
        if len(self.known) >= KEPT:
            del self.known[next(iter(self.known))]
        prepared = self.known[key] = self._prepare(calls, said[0])
        return prepared

    @torch.inference_mode(False)  # otherwise the views could not be written outside inference mode
    def _prepare(self, calls: Sequence[bytes], call: CodedCall) -> Summing | Sources:
        mesh, numel = self._mesh, call.numel
        views = [self._view(place, call.dtype, *_CALL.unpack(one)[1:]) for place, one in enumerate(calls)]
        if call.kind == codes.BROADCAST:
            return [views[call.root]]
        if call.kind in (codes.ALL_GATHER, codes.REDUCE_SCATTER):
            return views
        if call.kind == codes.ALL_TO_ALL:
            part = numel // mesh.size
            return [view[mesh.place * part : (mesh.place + 1) * part] for view in views]
        bounds = owned_slice(numel, call.dtype.itemsize, mesh.place, self._owners)
        return Summing(views, call.op, bounds, self._divide_by, self._scratch)

    def _view(self, place: int, dtype: torch.dtype, numel: int, arena: int, offset: int) -> torch.Tensor:
        """The contribution of one rank."""
        if arena == NOWHERE:
            return torch.empty(0, dtype=dtype, device="cpu")
        own = place == self._mesh.place
        memory = self._arenas.arena(arena).bytes if own else self._mesh.memory_of(place, arena)
        return memory[offset : offset + numel * dtype.itemsize].view(dtype)

    def forget(self, place: int, arena: int) -> None:
        """Drop views of an arena, so that it can be unmapped. Its number is never reused."""
        at = place * _CALL.size
        for key in list(self.known):
            if _CALL.unpack_from(key, at)[2] == arena:
                del self.known[key]


def owned_slice(numel: int, itemsize: int, place: int, owners: int) -> tuple[int, int]:
    """The first element of the slice that a rank combines, and the one after its last. Some may own nothing."""
    grain = max(1, CACHE_LINE // itemsize)
    step = -(-numel // (grain * owners)) * grain
    return min(place * step, numel), min((place + 1) * step, numel)
