"""The position of a run in its data: the order of an epoch, and saved positions.

An epoch is one permutation of the dataset. A global batch is the next stretch of it, and the share of a rank (or a
lane) is a slice of the batch. So the position is one number, and a world of any size can continue from it.
"""

import hashlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch

from paceline.errors import UsageError
from paceline.randomness import mixed

VERSION = 1
_SAMPLED = 256  # the number of places of an order that its fingerprint samples


@dataclass(frozen=True, slots=True)
class Cursor:
    """The position of a run in its data: `committed` samples of epoch `epoch` are done, counted over all ranks."""

    seed: int = 0
    epoch: int = 0
    committed: int = 0

    def __post_init__(self) -> None:
        for name in ("epoch", "committed"):
            if getattr(self, name) < 0:
                raise UsageError(f"a cursor's {name} must be at least 0, got {getattr(self, name)}")


def order(seed: int, epoch: int, length: int, *, shuffle: bool = True) -> torch.Tensor:
    """The samples of one epoch in the order in which they are used: int64 indices of a dataset of `length`.

    It takes 8 bytes per sample on every rank: 8 MB for a million samples, 8 GB for 10⁹.
    """
    if not shuffle:
        return torch.arange(length, device="cpu")
    generator = torch.Generator(device="cpu")
    generator.manual_seed(mixed(seed, epoch))
    return torch.randperm(length, generator=generator, device="cpu")


def fingerprint(order: torch.Tensor) -> str:
    """A short text that differs when the order does: another version of torch may draw another permutation."""
    places = torch.linspace(
        0, max(len(order) - 1, 0), min(_SAMPLED, len(order)), dtype=torch.float64, device="cpu"
    ).long()
    return hashlib.blake2b(repr(order[places].tolist()).encode(), digest_size=8).hexdigest()


def is_integer(value: object, lowest: int | None = None) -> bool:
    """Whether a value is a whole number, and not below `lowest`."""
    # SupportsIndex, as in torch: NumPy integers are accepted.
    return isinstance(value, SupportsIndex) and (lowest is None or operator.index(value) >= lowest)


def check_integer(name: str, value: object, lowest: int | None = None) -> None:
    """Raise UsageError unless a value is a whole number of at least `lowest`."""
    if not is_integer(value, lowest):
        at_least = "" if lowest is None else f" of at least {lowest}"
        raise UsageError(f"{name} must be a whole number{at_least}, got {value!r}")


def _is_whole(value: object) -> bool:
    return is_integer(value) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_whole(value) and is_integer(value, 0)


# The requirement on each field of a saved position, as text and as a test.
_COUNT = ("a whole number of at least 0", _is_count)
_FLAG = ("True or False", lambda value: isinstance(value, bool))
LOADER_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "version": ("a whole number", _is_whole),
    "seed": ("a whole number", _is_whole),
    "epoch": _COUNT,
    "committed": _COUNT,
    "step": _COUNT,
    "length": (f"{_COUNT[0]}, or None", lambda value: value is None or _is_count(value)),  # None: a stream
    "shuffle": _FLAG,
    "order": ("text", lambda value: isinstance(value, str)),
    "manual_commit": _FLAG,
}
SAMPLER_FIELDS = {name: LOADER_FIELDS[name] for name in ("seed", "epoch", "committed", "length")}


def check_state(state: Mapping[str, Any], fields: Mapping[str, tuple[str, Callable[[Any], bool]]], owner: str) -> None:
    """Raise UsageError if a field of a saved position is missing or of another type."""
    if not isinstance(state, Mapping):
        raise UsageError(f"the state of a {owner} must be a dict, as state_dict() returns it, got {state!r}")
    if state.get("version", VERSION) != VERSION:  # checked first: another version may have other fields
        raise UsageError(f"the {owner}'s state has version {state['version']!r}, expected {VERSION}")
    if missing := set(fields) - set(state):
        raise UsageError(f"this is not the state of a {owner}: it lacks {', '.join(sorted(missing))}")
    for name, (expected, fits) in fields.items():
        if not fits(state[name]):
            raise UsageError(
                f"the {owner}'s state has {name}={state[name]!r}, expected {expected}; load what state_dict() "
                f"returned, or a checkpoint that holds it"
            )
