"""Drift: when digests differ, find the tensor, the element and the rank, and make the replicas equal again.

Every function here that takes a group is called by all ranks, with the same pieces. Every rank decides from what was
gathered from all ranks, so all decide the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from paceline.agree.state_digest import Piece, state_digest
from paceline.collectives.gather import gather_bytes, gather_ints, gather_unless_equal
from paceline.collectives.group import Group
from paceline.collectives.protocols import check_root
from paceline.collectives.subgroup import ranks_of
from paceline.errors import NoMajority, ReplicaDrift

BLOCKS = 64
FEW_BYTES = 1024
CHUNK_BYTES = 64 * 1024 * 1024
NAMED_AT_MOST = 3
SEARCH = "the search for drift"  # how messages name a wait in this file
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDrift:
    """One piece that is not equal on all ranks. `groups` are the ranks that agree with each other, largest first."""

    name: str
    number: int  # among the pieces that were compared
    groups: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that hold this piece."""
        return tuple(sorted(rank for group in self.groups for rank in group))

    @property
    def majority(self) -> tuple[int, ...]:
        """The ranks that agree, if they are more than half of all."""
        return self.groups[0] if 2 * len(self.groups[0]) > sum(map(len, self.groups)) else ()

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks that differ from the majority; none if there is no majority."""
        return tuple(sorted(rank for group in self.groups[1:] for rank in group)) if self.majority else ()

    @property
    def who(self) -> str:
        """Which ranks differ from which, as text."""
        if self.majority:
            verb = "differs" if len(self.odd) == 1 else "differ"
            apart = ", each in its own way," if len(self.groups) > 2 else ""
            return f"{ranks_text(self.odd)} {verb}{apart} from {ranks_text(self.majority)}"
        size = sum(map(len, self.groups))
        if size == 2:
            return f"{ranks_text(self.ranks)} differ"
        if len(self.groups) == size:
            return f"all {size} ranks differ"
        return f"ranks fall into {len(self.groups)} groups ({'; '.join(map(ranks_text, self.groups))}) that differ"


@dataclass(frozen=True)
class Element:
    """The first element that differs: its bits, as an unsigned integer, and its value, for each of `ranks`."""

    index: tuple[int, ...]
    dtype: torch.dtype
    bits: tuple[int, ...]
    values: tuple[object, ...]
    ranks: tuple[int, ...]

    def text(self, groups: Sequence[Sequence[int]]) -> str:
        """Its values on the ranks, in the order of `groups`."""
        by_bits: dict[int, list[int]] = {}
        for rank in (rank for group in groups for rank in group):
            by_bits.setdefault(self.bits[self.ranks.index(rank)], []).append(rank)
        values = ", ".join(
            f"{self.values[self.ranks.index(ranks[0])]!r} (0x{bits:0{2 * self.dtype.itemsize}x}) on {ranks_text(ranks)}"
            for bits, ranks in list(by_bits.items())[: NAMED_AT_MOST + 1]
        )
        where = f"The first difference is element {list(self.index)}:" if self.index else "Its value is"
        if len(by_bits) != 2:
            return f"{where} {values}"
        first, second = by_bits
        changed = first ^ second
        count = changed.bit_count()
        differ = f"bit {changed.bit_length() - 1} differs" if count == 1 else f"{count} bits differ"
        return f"{where} {values}; {differ}"


@dataclass(frozen=True)
class Drift:
    """Every tensor that differs, in the order of the pieces, and the first differing element of the first one."""

    step: int
    size: int
    compared: int
    tensors: tuple[TensorDrift, ...]
    element: Element | None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks at fault or, without a majority, all ranks that differ from each other."""
        found: set[int] = set()
        for tensor in self.tensors:
            found.update(tensor.odd or tensor.ranks)
        return tuple(sorted(found))

    @property
    def healable(self) -> bool:
        """Whether a majority determines the right values of every tensor."""
        return all(tensor.majority for tensor in self.tensors)

    @property
    def text(self) -> str:
        """What happened and what to do; the same text on all ranks."""
        where = ranks_text(self.ranks)
        if self.healable:
            advice = (
                f"Heal {where} from the majority, or restart from a checkpoint; if it happens there again, suspect the "
                f"memory or the processor of that machine"
            )
        else:
            advice = (
                "No majority says which values are right: restart all ranks from a checkpoint, or name the rank to "
                "trust; if no memory is at fault, look for code that changes state on some ranks only"
            )
        return f"replicas have drifted apart at step {self.step}: {self.differences}. {advice}"

    def error(self) -> ReplicaDrift:
        known = self.healable and len(self.ranks) < self.size  # then at least one rank is right everywhere
        return ReplicaDrift(self.text, ranks=self.ranks, known=known, tensor=self.tensors[0].name, step=self.step)

    def text_of_healed(self, trust: int | None) -> str:
        """What happened and what was done; without a majority, rank `trust` was taken."""
        whose = "the majority" if self.healable else f"rank {trust}, as trust={trust} asks"
        return (
            f"replicas have drifted apart at step {self.step}: {self.differences}. All ranks continue with the values "
            f"of {whose}; if it happens again on {ranks_text(self.ranks)}, suspect the memory or the processor there, "
            f"or code that changes state on some ranks only"
        )

    @property
    def differences(self) -> str:
        """Which ranks differ, in which tensors, and in which element of the first."""
        first, *others = self.tensors
        sentences = [f"{first.who} in {first.name}"]
        if self.element is not None:
            sentences.append(self.element.text(first.groups))
        if others:
            names = ", ".join(tensor.name for tensor in others[:NAMED_AT_MOST])
            more = " and others" if len(others) > NAMED_AT_MOST else ""
            count = f"{len(self.tensors)} of {self.compared} tensors differ"
            sentences.append(f"{count}, also {names}{more}, on {ranks_text(self.ranks)}")
        return ". ".join(sentences)


def locate(pieces: Sequence[Piece], group: Group, *, step: int) -> Drift:
    """Compare the pieces of all ranks one by one. All ranks call it.

    Raises ReplicaDrift when ranks hold different tensors, whose bits cannot be compared. Returns a
    Drift without tensors when all are equal.
    """
    _check_alike(pieces, group, step)
    digests = gather_ints(group, [state_digest([piece.flat()]) for piece in pieces], SEARCH)
    found = []
    for number, piece in enumerate(pieces):
        groups = groups_of([row[number] for row in digests], ranks_of(group))
        if len(groups) > 1:
            found.append(TensorDrift(piece.name, number, groups))
    element = _first_element(pieces[found[0].number], group) if found else None
    return Drift(step, group.size, len(pieces), tuple(found), element)


def heal(
    drift: Drift,
    pieces: Sequence[Piece],
    group: Group,
    *,
    trust: int | None = None,
) -> list[str]:
    """Overwrite what differs with the values of the majority, and compare again. All ranks call it.

    `pieces` are those passed to `locate`. Without a majority the values of rank `trust` are taken (its number
    within the group); without `trust` every rank raises NoMajority and nothing is changed. Returns the names of what
    was healed.
    """
    if trust is not None:
        check_root(trust, group.size)
    known = ranks_of(group)
    sources = [known.index(tensor.majority[0]) if tensor.majority else trust for tensor in drift.tensors]
    for tensor, source in zip(drift.tensors, sources, strict=True):
        if source is None:
            why = "two ranks cannot outvote each other" if drift.size == 2 else "no group of them is more than half"
            raise NoMajority(
                f"{tensor.name} cannot be healed at step {drift.step}: {tensor.who}, and {why}, so it is not known "
                f"whose values are right. Name the rank to take them from (trust=), or restart from a checkpoint",
                ranks=drift.ranks,
                tensor=tensor.name,
                step=drift.step,
            )
    for tensor, source in zip(drift.tensors, sources, strict=True):
        spread(pieces[tensor.number], source or 0, group)
    after = gather_ints(group, [state_digest([pieces[tensor.number].flat()]) for tensor in drift.tensors], SEARCH)
    for number, tensor in enumerate(drift.tensors):
        if len({row[number] for row in after}) > 1:
            raise ReplicaDrift(
                f"{tensor.name} still differs between ranks after it was healed at step {drift.step}: its memory does "
                f"not keep what is written. Take the machine of {ranks_text(drift.ranks)} out of the job "
                f"and restart from a checkpoint",
                ranks=drift.ranks,
                known=drift.healable,
                tensor=tensor.name,
                step=drift.step,
            )
    return [tensor.name for tensor in drift.tensors]


def _check_alike(pieces: Sequence[Piece], group: Group, step: int) -> None:
    """Refuse to compare ranks that hold different tensors."""
    described = gather_unless_equal(group, [_described(piece) for piece in pieces], SEARCH)
    if described is None:
        return
    by_rank = dict(zip(ranks_of(group), described, strict=True))
    groups = groups_of([repr(one) for one in described], ranks_of(group))
    ours, theirs = (by_rank[ranks[0]] for ranks in groups[:2])
    here, there = next(pair for pair in zip_longest(ours, theirs) if pair[0] != pair[1])
    found = TensorDrift((here or there)[0], 0, groups)
    raise ReplicaDrift(
        f"ranks hold different state at step {step}, so their values cannot be compared: where "
        f"{_holding(groups[0], here)}, {_holding(groups[1], there)}. Build the model and the optimizer the same way, "
        f"and load the same checkpoint, on every rank",
        ranks=found.odd or ranks_of(group),
        tensor=found.name,
        step=step,
    )


def _described(piece: Piece) -> list[object]:
    """What must be equal on all ranks before bits can be compared."""
    return [piece.name, list(piece.tensor.shape), str(piece.tensor.dtype), piece.begin, piece.end]


def _holding(ranks: Sequence[int], described: Sequence[Any] | None) -> str:
    verb = "has" if len(ranks) == 1 else "have"
    if described is None:
        return f"{ranks_text(ranks)} {verb} nothing"
    name, shape, dtype, begin, end = described
    return f"{ranks_text(ranks)} {verb} {name} {shape} of {dtype} (elements {begin} to {end})"


def groups_of(values: Sequence[object], ranks: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """The ranks with equal values, the largest group first; of two equally large the one with the lowest rank. `ranks`:
    who has each value, if that is not the first rank, the second, and so on."""
    by_value: dict[object, list[int]] = {}
    for rank, value in zip(range(len(values)) if ranks is None else ranks, values, strict=True):
        by_value.setdefault(value, []).append(rank)
    return tuple(sorted((tuple(ranks) for ranks in by_value.values()), key=lambda ranks: (-len(ranks), ranks[0])))


def _first_element(piece: Piece, group: Group) -> Element | None:
    """Narrow down by the digests of blocks, then compare the bytes themselves. Takes a few small messages and no large
    one."""
    flat = piece.flat().resolve_conj().resolve_neg()
    itemsize = flat.dtype.itemsize
    begin, end = 0, flat.numel()
    while (end - begin) * itemsize > FEW_BYTES:
        width = -(-(end - begin) // BLOCKS)
        places = range(begin, end, width)
        digests = gather_ints(group, [state_digest([flat[at : min(at + width, end)]]) for at in places], SEARCH)
        unequal = [at for number, at in enumerate(places) if len({row[number] for row in digests}) > 1]
        if not unequal:
            return None  # it changed during the search
        begin, end = unequal[0], min(unequal[0] + width, end)
    mine = flat[begin:end].cpu().contiguous().view(torch.uint8)
    raws = gather_bytes(group, bytes(mine.tolist()), SEARCH)
    for at in range(end - begin):
        bits = [raw[at * itemsize : (at + 1) * itemsize] for raw in raws]
        if len(set(bits)) > 1:
            values = [torch.frombuffer(bytearray(one), dtype=flat.dtype).tolist()[0] for one in bits]
            patterns = tuple(int.from_bytes(one, "little") for one in bits)
            place = element_index(piece, begin + at)
            return Element(place, flat.dtype, patterns, tuple(values), tuple(ranks_of(group)))
    return None


def spread(piece: Piece, source: int, group: Group) -> None:
    """Overwrite a piece on all other ranks with that of rank `source`, as bytes, in messages of bounded size."""
    width = max(1, CHUNK_BYTES // piece.tensor.dtype.itemsize)
    for begin in range(piece.begin, piece.end, width):
        chunk = Piece(piece.name, piece.tensor, begin, min(begin + width, piece.end))
        flat = chunk.flat().resolve_conj().resolve_neg().clone()
        group.wait(group.transport.broadcast(flat.view(torch.uint8), source), SEARCH)
        if group.rank != source:
            overwrite(chunk, flat)


def overwrite(piece: Piece, flat: torch.Tensor) -> None:
    """Give the elements of a piece the values of `flat`, bit for bit."""
    with torch.no_grad():
        tensor = piece.tensor.detach()
        if tensor.is_contiguous():
            _as_bits(tensor.view(-1)[piece.begin : piece.end]).copy_(_as_bits(flat))
            return
        rows, before = piece.rows(tensor)
        new = rows.clone(memory_format=torch.contiguous_format)
        new.view(-1)[before : before + piece.numel] = flat
        _as_bits(rows).copy_(_as_bits(new))


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: copies of floating point numbers need not keep the bits of a NaN."""
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_SAME_SIZE[tensor.dtype.itemsize])


def element_index(piece: Piece, at: int) -> tuple[int, ...]:
    """The index of the element `at` of a piece in the whole tensor."""
    place = torch.tensor(piece.begin + at, device="cpu")
    return tuple(int(index) for index in torch.unravel_index(place, piece.tensor.shape))


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 0`, `ranks 0 and 1`, `ranks 0, 1 and 3`."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
