"""Compare state: between runs, by one hash; between ranks, by a digest of every tensor before it is saved."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.agree.drift import Drift, TensorDrift, groups_of
from paceline.agree.state_digest import start_digest
from paceline.bare import bare
from paceline.checkpoint.checkpoint_errors import CheckpointError
from paceline.checkpoint.ranks import OptionalGroup, gather, text_hash
from paceline.checkpoint.state import state_of
from paceline.errors import ReplicaDrift
from paceline.stored.json_tree import Encoder
from paceline.stored.tensor_file import bytes_of
from paceline.stored.value_tree import dtype_name


@dataclass(frozen=True, slots=True)
class Compared:
    """One piece of the state that several ranks hold: this rank's elements, and their digest."""

    name: str
    holders: tuple[int, ...]
    elements: torch.Tensor | None  # None: this rank does not hold it


def digests_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A digest of each tensor, whatever device it is on: they show in which tensors ranks differ."""
    started = [start_digest([tensor]) for tensor in tensors]
    return [one.value() for one in started]


def compare(
    step: int, pieces: Sequence[Compared], note: str, group: OptionalGroup
) -> tuple[list[int | None], list[str]]:
    """Raise ReplicaDrift on all ranks unless all ranks that hold a piece hold the same bits. Returns the digests of
    those that this rank holds, and the notes of all ranks. All ranks call it, with the same pieces."""
    held = [piece.elements for piece in pieces if piece.elements is not None]
    left = iter(digests_of(held))
    own = [None if piece.elements is None else next(left) for piece in pieces]
    teams: dict[tuple[int, ...], list[int]] = {}
    for at, piece in enumerate(pieces):
        teams.setdefault(piece.holders, []).append(at)
    rows = gather([note, *(text_hash(repr([own[at] for at in run])) for run in teams.values())], group)
    if all(len({rows[rank][at] for rank in holders}) == 1 for at, holders in enumerate(teams, start=1)):
        return own, [row[0] for row in rows]
    found: dict[str, TensorDrift] = {}
    rows = gather(own, group)
    for at, piece in enumerate(pieces):
        groups = groups_of([rows[rank][at] for rank in piece.holders])
        if len(groups) > 1:
            in_world = tuple(tuple(piece.holders[rank] for rank in some) for some in groups)
            found.setdefault(piece.name, TensorDrift(piece.name, at, in_world))
    drift = Drift(step, len(rows), len({piece.name for piece in pieces}), tuple(found.values()), None)
    error = drift.error()
    raise ReplicaDrift(
        f"step {step} is not saved: {error}", ranks=error.ranks, known=error.known, tensor=error.tensor, step=step
    )


def check_copy(name: str, copy: torch.Tensor, expected: int) -> None:
    """Raise CheckpointError if a copy of a piece differs from what the ranks compared."""
    if digests_of([copy])[0] != expected:
        raise CheckpointError(
            f"the copy of {name} in host memory does not match what the ranks compared: it changed before it was "
            f"written; test the memory of this machine"
        )


def digest(model: nn.Module | None, optimizer: torch.optim.Optimizer | None, step: int, cursor: Any = None) -> str:
    """The SHA-256 of parameters, buffers, optimizer state, step and sample cursor, as 64 hexadecimal digits.

    `cursor` is a plain value or has a state_dict(). Names, dtypes, shapes and bytes are hashed in the order of names,
    so the same state gives the same digest on any device, in any wrapper, before and after a checkpoint.
    """
    state = {
        "model": None if model is None else bare(model).state_dict(),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "step": step,
        "cursor": state_of(cursor),
    }
    found = hashlib.sha256()
    for path, value in sorted(_leaves(state, ""), key=lambda leaf: leaf[0]):
        if isinstance(value, torch.Tensor):
            host = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
            found.update(f"{path} {dtype_name(host.dtype)} {list(host.shape)}\n".encode())
            found.update(bytes_of(host))
        else:
            found.update(f"{path} {json.dumps(value)}\n".encode())
    return found.hexdigest()


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key!r}")
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index:08d}")
    elif isinstance(value, torch.Tensor):
        yield path, value
    else:
        encoder = Encoder()
        yield path, encoder.encode(value)
        for name, tensor in encoder.tensors.items():  # of numpy
            yield f"{path}/{name}", tensor
