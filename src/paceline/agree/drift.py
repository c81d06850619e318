"""When the words of ranks differ: which tensor, which element, which rank, and how to make them equal again.

Every function here is called by all ranks with pieces that were cut alike. What one rank decides follows from what was
gathered from all of them, so all decide the same.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.agree import drift_text
from paceline.agree.pieces import Piece
from paceline.agree.word import word_of
from paceline.collectives.api import Transport, Work, check_root
from paceline.collectives.wait import finish
from paceline.errors import NoMajority, ReplicaDrift

BLOCKS = 64
FEW_BYTES = 1024
CHUNK_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class TensorDrift:
    """One piece that is not equal on all ranks. `groups` are the ranks that agree with each other, largest first."""

    name: str
    number: int  # among the pieces that were compared
    groups: tuple[tuple[int, ...], ...]

    @property
    def majority(self) -> tuple[int, ...]:
        """The ranks that agree, if they are more than half of all."""
        return self.groups[0] if 2 * len(self.groups[0]) > sum(map(len, self.groups)) else ()

    @property
    def odd(self) -> tuple[int, ...]:
        """The ranks that differ from the majority; none if there is no majority."""
        return tuple(sorted(rank for group in self.groups[1:] for rank in group)) if self.majority else ()


@dataclass(frozen=True)
class Element:
    """The first element that differs: its bits, as an unsigned integer, and its value, for every rank."""

    index: tuple[int, ...]
    dtype: torch.dtype
    bits: tuple[int, ...]
    values: tuple[object, ...]


@dataclass(frozen=True)
class Drift:
    """What was found: every tensor that differs, in the order of the pieces, and the first element of the first."""

    step: int
    size: int
    compared: int
    tensors: tuple[TensorDrift, ...]
    element: Element | None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks at fault. Where no majority says which these are: all that differ from each other."""
        found: set[int] = set()
        for tensor in self.tensors:
            found.update(tensor.odd or range(self.size))
        return tuple(sorted(found))

    @property
    def healable(self) -> bool:
        """Whether a majority says what every tensor should be."""
        return all(tensor.majority for tensor in self.tensors)

    @property
    def text(self) -> str:
        """What happened and what to do, the same on all ranks."""
        return drift_text.describe(self)

    def text_of_healed(self, trust: int | None) -> str:
        """What happened, and what was done: `trust` was asked where there was no majority."""
        return drift_text.describe(self, drift_text.what_was_done(self, trust))

    def error(self) -> ReplicaDrift:
        name = self.tensors[0].name if self.tensors else ""
        return ReplicaDrift(self.text, ranks=self.ranks, tensor=name, step=self.step)


def locate(pieces: Sequence[Piece], transport: Transport, *, step: int, timeout_s: float | None = None) -> Drift:
    """Compare the pieces of all ranks one by one. All ranks call it.

    Raises ReplicaDrift itself when ranks do not hold the same tensors: then there are no bits to compare. Returns a
    Drift without tensors when all are equal.
    """
    talk = _Talk(transport, timeout_s)
    _check_alike(pieces, talk, step)
    words = talk.gather([word_of([piece.flat()]) for piece in pieces])
    found = []
    for number, piece in enumerate(pieces):
        groups = groups_of([row[number] for row in words])
        if len(groups) > 1:
            found.append(TensorDrift(piece.name, number, groups))
    element = _first_element(pieces[found[0].number], talk) if found else None
    return Drift(step, transport.size, len(pieces), tuple(found), element)


def heal(
    drift: Drift,
    pieces: Sequence[Piece],
    transport: Transport,
    *,
    trust: int | None = None,
    timeout_s: float | None = None,
) -> list[str]:
    """Overwrite what differs with the values of the majority, and compare again. All ranks call it.

    `pieces` are those that were located. Where there is no majority the values of rank `trust` are taken; without one
    NoMajority is raised on every rank and nothing is changed. Returns the names of what was healed.
    """
    if trust is not None:
        check_root(trust, transport.size)
    sources = [tensor.majority[0] if tensor.majority else trust for tensor in drift.tensors]
    for tensor, source in zip(drift.tensors, sources, strict=True):
        if source is None:
            raise NoMajority(
                drift_text.no_majority(drift, tensor), ranks=drift.ranks, tensor=tensor.name, step=drift.step
            )
    talk = _Talk(transport, timeout_s)
    for tensor, source in zip(drift.tensors, sources, strict=True):
        _spread(pieces[tensor.number], source or 0, talk)
    after = talk.gather([word_of([pieces[tensor.number].flat()]) for tensor in drift.tensors])
    for number, tensor in enumerate(drift.tensors):
        if len({row[number] for row in after}) > 1:
            raise ReplicaDrift(
                f"{tensor.name} still differs between ranks after it was healed at step {drift.step}: its memory does "
                f"not keep what is written. Take the machine of rank {drift_text.listed(drift.ranks)} out and restart "
                f"from a checkpoint",
                ranks=drift.ranks,
                tensor=tensor.name,
                step=drift.step,
            )
    return [tensor.name for tensor in drift.tensors]


class _Talk:
    """Small messages between all ranks, by host memory."""

    def __init__(self, transport: Transport, timeout_s: float | None) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self.rank = transport.rank

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """The same number of integers from each rank."""
        if not values:
            return [[] for _ in range(self._transport.size)]
        return self._gather(torch.tensor(values, dtype=torch.int64, device="cpu"))

    def gather_bytes(self, raw: bytes) -> list[bytes]:
        """The same number of bytes, at least one, from each rank."""
        return [bytes(row) for row in self._gather(torch.frombuffer(bytearray(raw), dtype=torch.uint8))]

    def broadcast(self, flat: torch.Tensor, root: int) -> None:
        self._finish(self._transport.broadcast(flat, root))

    def _gather(self, part: torch.Tensor) -> list[list[int]]:
        out = torch.empty(self._transport.size * part.numel(), dtype=part.dtype, device="cpu")
        self._finish(self._transport.all_gather(out, part))
        rows: list[list[int]] = out.view(self._transport.size, -1).tolist()
        return rows

    def _finish(self, work: Work) -> None:
        finish(work, what="the search for drift", watch=self._transport.watch, timeout_s=self._timeout_s)


def _check_alike(pieces: Sequence[Piece], talk: _Talk, step: int) -> None:
    """Refuse to compare ranks that hold different tensors. The first message has a size that depends on nothing."""
    text = json.dumps([piece.signature for piece in pieces]).encode()
    digest = hashlib.sha256(text).digest()
    heads = talk.gather([len(text), *digest])
    if all(head == heads[0] for head in heads):
        return
    longest = max(head[0] for head in heads)
    texts = talk.gather_bytes(text.ljust(longest))
    described = [json.loads(text) for text in texts]
    ranks, name, message = drift_text.unlike(described, step)
    raise ReplicaDrift(message, ranks=ranks, tensor=name, step=step)


def groups_of(values: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """The ranks with equal values, the largest group first; of two equally large the one with the lowest rank."""
    by_value: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(value, []).append(rank)
    return tuple(sorted((tuple(ranks) for ranks in by_value.values()), key=lambda ranks: (-len(ranks), ranks[0])))


def _first_element(piece: Piece, talk: _Talk) -> Element | None:
    """Narrow down by the words of blocks, then look at the bytes themselves. A few small messages, no large one."""
    flat = piece.flat().resolve_conj().resolve_neg()
    itemsize = flat.dtype.itemsize
    begin, end = 0, flat.numel()
    while (end - begin) * itemsize > FEW_BYTES:
        width = -(-(end - begin) // BLOCKS)
        places = range(begin, end, width)
        words = talk.gather([word_of([flat[at : min(at + width, end)]]) for at in places])
        unequal = [at for number, at in enumerate(places) if len({row[number] for row in words}) > 1]
        if not unequal:
            return None  # it changed while it was looked at
        begin, end = unequal[0], min(unequal[0] + width, end)
    mine = flat[begin:end].cpu().contiguous().view(torch.uint8)
    raws = talk.gather_bytes(bytes(mine.tolist()))
    for at in range(end - begin):
        bits = [raw[at * itemsize : (at + 1) * itemsize] for raw in raws]
        if len(set(bits)) > 1:
            values = [torch.frombuffer(bytearray(one), dtype=flat.dtype).tolist()[0] for one in bits]
            patterns = tuple(int.from_bytes(one, "little") for one in bits)
            return Element(piece.index(begin + at), flat.dtype, patterns, tuple(values))
    return None


def _spread(piece: Piece, source: int, talk: _Talk) -> None:
    """Overwrite a piece on all other ranks with that of rank `source`, as bytes, in messages of bounded size."""
    width = max(1, CHUNK_BYTES // piece.tensor.dtype.itemsize)
    for begin in range(piece.begin, piece.end, width):
        chunk = Piece(piece.name, piece.tensor, begin, min(begin + width, piece.end))
        flat = chunk.flat().resolve_conj().resolve_neg().clone()
        talk.broadcast(flat.view(torch.uint8), source)
        if talk.rank != source:
            chunk.write(flat)
