"""The tensors of a training state that each rank writes, and their names in its files."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from paceline.checkpoint.compare import Compared
from paceline.checkpoint.ranks import text_hash
from paceline.checkpoint.state import TrainingState
from paceline.checkpoint.striping import Held, Stripe, stripe
from paceline.errors import CollectiveMismatch
from paceline.stored.tensor_file import PARTS
from paceline.stored.tensor_part import Order, TensorPart, flat_of, order_of

Described = dict[str, Any]


class Share(NamedTuple):
    """What one rank writes to one file: tensors by the name of their entry and, for parts, the tensor they belong
    to."""

    tensors: dict[str, torch.Tensor]
    parts: dict[str, tuple[str, int, Sequence[int], Order]]  # the tensor's name, the first element, shape and order

    @property
    def metadata(self) -> dict[str, str]:
        return {PARTS: json.dumps(self.parts)} if self.parts else {}


class Deal(NamedTuple):
    """How a snapshot is dealt out to the ranks, as one rank sees it."""

    shares: dict[str, Share]  # what this rank writes, by file
    compared: list[Compared]  # what several ranks hold, in the same order on all of them
    entries: list[tuple[str, str] | None]  # for each of these, the file and entry to which this rank writes it
    teams: list[tuple[int, ...]]  # the ranks that write to each directory, the one that completes it first


def describe(state: TrainingState) -> Described:
    """What other ranks must know about this rank's state to deal it out. Small; gathered with other values."""
    found: Described = {}
    for file, tensors in state.files.items():
        parts = {name: value for name, value in tensors.items() if isinstance(value, TensorPart)}
        whole = [(name, *_kind(tensors[name])) for name in tensors if name in state.equal[file] and name not in parts]
        forms = [(name, *_kind(value)) for name, value in parts.items()]
        spans = [value.span for value in parts.values()]
        found[file] = [text_hash(repr(whole)), text_hash(repr(forms)), spans]
    return found


def _kind(value: torch.Tensor | TensorPart) -> tuple[object, ...]:
    like = value.form if isinstance(value, TensorPart) else value
    return str(value.dtype), tuple(value.shape), order_of(like)


def deal(
    state: TrainingState, described: Sequence[Described], homes: Sequence[int], rank: int, *, compared: bool
) -> Deal:
    """Deal the state out. `described` is that of all ranks, and `homes` for each the lowest that shares its directory.

    The lowest rank of each directory writes its own copy of what is not known to be equal on all ranks.
    """
    held: list[Held] = []
    files: list[str] = []
    shares = {file: Share({}, {}) for file in state.files}
    for file, tensors in state.files.items():
        wholes, forms, spans = zip(*(one[file] for one in described), strict=True)
        if len(set(forms)) > 1:
            odd = [other for other, form in enumerate(forms) if form != forms[0]]
            raise CollectiveMismatch(
                f"rank {odd[0]} holds shards of other tensors than rank 0, so nothing was saved; pass the same model "
                f"and optimizers to save() on all ranks",
                ranks=odd,
            )
        alike, number = compared and len(set(wholes)) == 1, 0
        for name, value in tensors.items():
            if isinstance(value, TensorPart):
                own = [tuple(row[number]) for row in spans]
                number += 1
                held.append(Held(name, value.form.numel(), value.dtype.itemsize, own, equal=compared))
                files.append(file)
            elif alike and name in state.equal[file]:
                everyone = [(0, value.numel())] * len(homes)
                can_be_cut = order_of(value) is not None and not (value.is_conj() or value.is_neg())
                held.append(Held(name, value.numel(), value.element_size(), everyone, True, can_be_cut))
                files.append(file)
            elif rank == homes[rank]:
                shares[file].tensors[name] = value
    pieces = stripe(held, homes)
    several: list[Compared] = []
    entries: list[tuple[str, str] | None] = []
    for piece in pieces:
        one, file = held[piece.index], files[piece.index]
        value = state.files[file][one.name]
        elements, part = _cut(value, piece) if rank in piece.holders else (None, None)
        entry = None
        if elements is not None and rank in piece.writers:
            entry = _put(shares[file], one.name, elements, part)
        if one.equal and len(piece.holders) > 1:
            several.append(Compared(one.name, piece.holders, elements))
            entries.append(None if entry is None else (file, entry))
    writers = {*homes, *(writer for piece in pieces for writer in piece.writers)}
    teams = [tuple(sorted(one for one in writers if homes[one] == home)) for home in sorted(set(homes))]
    return Deal(shares, several, entries, teams)


def _cut(
    value: torch.Tensor | TensorPart, piece: Stripe
) -> tuple[torch.Tensor, tuple[int, Sequence[int], Order] | None]:
    """The elements of a piece, and the part that they are: first element, shape, and order of the whole tensor."""
    like = value.form if isinstance(value, TensorPart) else value
    order = order_of(like)
    natural = tuple(range(like.dim()))
    if piece.end - piece.begin == like.numel() and (order == natural or not isinstance(value, TensorPart)):
        return (value.values.view(like.shape) if isinstance(value, TensorPart) else value), None
    assert order is not None
    begin, flat = (value.begin, value.values) if isinstance(value, TensorPart) else (0, flat_of(value))
    return flat[piece.begin - begin : piece.end - begin], (piece.begin, list(like.shape), order)


def _put(share: Share, name: str, elements: torch.Tensor, part: tuple[int, Sequence[int], Order] | None) -> str:
    """Add a piece to what a rank writes. Returns the name of its entry."""
    entry = name
    if part is None and name in share.tensors:
        part = (0, list(elements.shape), tuple(range(elements.dim())))
    if part is not None:
        entry = f"{name}[{part[0]}:{part[0] + elements.numel()}]"
        while entry in share.tensors:  # a tensor already has this name
            entry += "'"
        share.parts[entry] = (name, *part)
    share.tensors[entry] = elements
    return entry
