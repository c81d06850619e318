"""How ranks receive their shards of a new generation from ranks that hold all shards between them.

Every source sends what it holds to all ranks, one source after another, and each rank keeps what lies in its own
blocks. So the number of shards before and after does not matter.

Note: the step from which a generation continues if states are in shards
----------------------------------------------------------------------
A rank that has committed step n has its shard of n + 1, and cannot go back. So n + 1 exists once some rank has
committed it for every shard, and n exists as long as some rank has not, for every shard. A loss must not leave some
shards only at n + 1 and others only at n.

Sums are complete rank by rank: if each rank receives its own shard of them, one rank may have all of its sums while
another still waits for a rank that will not send. So here a rank's report, which all ranks read before an update,
leaves after its sums have arrived (`ReducerSettings.report_last`): a rank that has read all reports knows that all have
their sums, and every surviving rank will commit. A rank that has not read them does not commit. On a device, where
reports are read a step later, ranks meet once more before the update (`Elastic._before_commit`).

A rank that has read the reports commits even if it learns of a loss before it does: other ranks may not have learned of
it. What remains are ranks that a loss stops while reports are in flight, or in other communication of the script
between the step and its commit, such as the norm of the gradients: some may have read all reports and others not, who
then drop a step that they could have made. Those who made it continue from the step before, if each of their shards has
a holder who dropped it. Neither step exists only if a loss falls within the exchange of a few bytes and separates all
holders of one shard from all holders of another; then the newest checkpoint is used, as when a lost rank was the only
one with its shard. No rank ever continues from shards of two steps: the launcher counts only those of one.

An update itself needs no other rank, so a loss does not interrupt it. Under "zero1" and "zero2" the parameters of other
ranks come after it, and under "zero3" what was gathered before it must be complete: the effect of a loss on these is
reported at the next use of a parameter (`UpdateGathers.outlive`, `Units.outlive`), when the step is committed. A rank
whose parameters lack updates of others still has its own shard whole. The parameters are gathered once more in the next
generation, from their owners, which include every rank that was healed.
"""

import json
from collections.abc import Mapping, Sequence

import torch

from paceline.collectives.gather import gather_bytes, gather_ints
from paceline.collectives.group import Group
from paceline.elastic.declared import Declared
from paceline.elastic.split_state import Parts, SplitState, owned_in, shards_in
from paceline.errors import ReplicasDiffer
from paceline.stored.packed import pack, unpack
from paceline.stored.tensor_part import TensorPart

WHAT = "the dealing out of shards"

Sums = dict[str, int]  # by the name of a tensor: the bits of its elements, added up
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_MODULUS = 1 << 64


def receive_parts(
    group: Group, declared: Declared, sources: Sequence[int], held: Mapping[str, SplitState], *, moves: bool
) -> dict[str, Parts]:
    """What this rank will own, if it does not have it already, by the names of the declared objects. All ranks call it.
    `held` is what this rank has, which is one shard of the state if it is one of `sources`."""
    wanted = declared.sources_of_due(len(sources)) if moves else set[int]()
    if moves and not wanted:  # it will own nothing, but must know what there is
        wanted = {group.rank % len(sources)}
    rows = gather_ints(group, [int(shard in wanted) for shard in range(len(sources))], WHAT)
    incoming = _Incoming(declared)
    for shard, source in enumerate(sources):
        if any(row[shard] for row in rows):
            blob = broadcast(group, _packed(held) if group.rank == source else b"", source)
            if shard in wanted:
                incoming.add(unpack(blob))
    return incoming.complete()


def broadcast(group: Group, blob: bytes, source: int) -> torch.Tensor:
    """The bytes of one rank, on all of them."""
    length = gather_ints(group, [len(blob)], WHAT)[source][0]
    if group.rank == source:
        flat = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    else:
        flat = torch.empty(length, dtype=torch.uint8, device="cpu")
    group.wait(group.transport.broadcast(flat, source), f"the state of rank {source}")
    return flat


def sums_of(state: Mapping[str, SplitState]) -> Sums:
    """The sums of this rank's parts."""
    return {
        f"{name}/{index}/{key}": _sum_of(part.values)
        for name, split in state.items()
        for index, parts in split.parts.items()
        for key, part in parts.items()
    }


def check_sums(group: Group, had: Sums, has: Sums, shards: int) -> None:
    """Raise ReplicasDiffer on all ranks unless what the sources had between them is what each group of consecutive
    `shards` ranks has between them now. `had`: of this rank, if it was a source. All ranks call it."""
    told = [json.loads(text) for text in gather_bytes(group, json.dumps([had, has]).encode(), WHAT)]
    expected = _added([before for before, _ in told])
    for first in range(0, group.size, shards):
        found = _added([now for _, now in told[first : first + shards]])
        if wrong := sorted(name for name in {**expected, **found} if expected.get(name) != found.get(name)):
            raise ReplicasDiffer(
                f"ranks {first} to {first + shards - 1} have taken their shards of the state, and {wrong[0]} is not "
                f"bit-identical to what it was before, in {len(wrong)} of {len(expected)} tensors: test the memory and "
                f"the network of these machines"
            )


class _Incoming:
    """The received parts of the blocks that this rank will own."""

    def __init__(self, declared: Declared) -> None:
        self._declared = declared
        self._parts: dict[str, Parts] = {}
        self._filled: dict[tuple[str, int, str], int] = {}

    def add(self, found: Mapping[str, Mapping[int, Mapping[str, tuple[int, torch.Tensor]]]]) -> None:
        """Take the parts of a source that lie in these blocks."""
        for name, by_index in found.items():
            thing = self._declared.stateful[name]
            owned, shards = owned_in(thing), shards_in(thing)
            assert owned is not None
            spans = owned.due_spans()
            for index, by_key in by_index.items():
                first, last = spans[id(shards[index])]
                of_index = self._parts.setdefault(name, {}).setdefault(index, {})
                for key, (begin, values) in by_key.items():
                    if key not in of_index:
                        memory = torch.empty(last - first, dtype=values.dtype, device=shards[index].value.device)
                        of_index[key] = TensorPart(memory, first, shards[index].form)
                    low, high = max(first, begin), min(last, begin + values.numel())
                    if low < high:
                        of_index[key].values[low - first : high - first] = values[low - begin : high - begin]
                        at = name, index, key
                        self._filled[at] = self._filled.get(at, 0) + high - low

    def complete(self) -> dict[str, Parts]:
        """The complete parts. Raises ReplicasDiffer if something is missing."""
        for name, by_index in self._parts.items():
            for index, by_key in by_index.items():
                for key, part in by_key.items():
                    if (found := self._filled.get((name, index, key), 0)) != part.values.numel():
                        raise ReplicasDiffer(
                            f"{found} of {part.values.numel()} elements of {name}/{index}/{key} came from the ranks "
                            f"that hold the state between them: their optimizers keep state for other parameters; call "
                            f"optimizer.step() on all ranks alike"
                        )
        return self._parts


def _packed(state: Mapping[str, SplitState]) -> bytes:
    found = {
        name: {
            index: {key: (part.begin, part.values) for key, part in parts.items()}
            for index, parts in split.parts.items()
        }
        for name, split in state.items()
        if split.parts
    }
    return pack(found, "shards")


def _sum_of(values: torch.Tensor) -> int:
    bits = values.detach().contiguous().view(-1).view(_SAME_SIZE[values.dtype.itemsize])
    return int(bits.sum(dtype=torch.int64)) % _MODULUS


def _added(sums: Sequence[Sums]) -> Sums:
    total: Sums = {}
    for one in sums:
        for name, value in one.items():
            total[name] = (total.get(name, 0) + value) % _MODULUS
    return total
