"""Whether all ranks hold the state that is saved. One that drifted before is not saved by anyone."""

from collections.abc import Mapping, Sequence

import torch

from paceline.agree.drift import Drift, TensorDrift, groups_of
from paceline.agree.word import start_word
from paceline.checkpoint.agree import Group, gather, here, number_of
from paceline.checkpoint.faults import CheckpointError
from paceline.errors import ReplicaDrift

Tensors = Mapping[str, torch.Tensor]
Words = tuple[int, ...]


def words_of(tensors: Tensors) -> Words:
    """A word for each tensor, whatever device it is on: where ranks differ, the words say in what."""
    started = [start_word([tensor]) for tensor in tensors.values()]
    return tuple(one.word() for one in started)


def compare(step: int, parts: Sequence[Tensors], group: Group) -> list[Words]:
    """Raise ReplicaDrift on all ranks unless all hold the same bits. Returns the words of each part. All ranks call it.

    A part that is not made of the same tensors on all ranks, such as the state of a sharded optimizer, has nothing that
    could be compared.
    """
    words = [words_of(tensors) for tensors in parts]
    own = [number for pair in zip(map(_signature, parts), map(_total, words), strict=True) for number in pair]
    rows = gather(own, group)
    drifted: list[TensorDrift] = []
    compared = 0
    for number, tensors in enumerate(parts):
        if len({row[2 * number] for row in rows}) > 1:
            continue
        if len({row[2 * number + 1] for row in rows}) > 1:
            drifted += _differences(tensors, words[number], compared, group)
        compared += len(tensors)
    if drifted:
        found = Drift(step, here(group)[1], compared, tuple(drifted), None)
        raise ReplicaDrift(
            f"step {step} is not saved: {found.text}", ranks=found.ranks, tensor=drifted[0].name, step=step
        )
    return words


def check_copy(parts: Sequence[Tensors], words: Sequence[Words]) -> None:
    """Raise CheckpointError if a copy of the parts is not what ranks have compared."""
    for tensors, expected in zip(parts, words, strict=True):
        found = words_of(tensors)
        changed = [name for name, old, new in zip(tensors, expected, found, strict=True) if old != new]
        if changed:
            raise CheckpointError(
                f"the copy of {changed[0]} in host memory is not what ranks have compared: it has changed before it "
                f"was written; test the memory of this machine"
            )


def _signature(tensors: Tensors) -> int:
    return number_of(repr([(name, tuple(one.shape), str(one.dtype)) for name, one in tensors.items()]))


def _total(words: Words) -> int:
    return number_of(repr(words))


def _differences(tensors: Tensors, words: Words, before: int, group: Group) -> list[TensorDrift]:
    rows = gather(words, group)
    groups = [groups_of([row[number] for row in rows]) for number in range(len(words))]
    names = list(tensors)
    return [TensorDrift(names[number], before + number, one) for number, one in enumerate(groups) if len(one) > 1]
