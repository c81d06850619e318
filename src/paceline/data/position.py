"""Saved positions, read back: what is missing, of a wrong kind or of other data is named."""

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, SupportsIndex

from paceline.data.order import Cursor
from paceline.errors import UsageError

VERSION = 1


class Kind(NamedTuple):
    """What a field must be, in words and as a question."""

    words: str
    fits: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    # SupportsIndex, as in torch: integers of numpy are as good as ours.
    return isinstance(value, SupportsIndex) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and operator.index(value) >= 0


WHOLE = Kind("a whole number", _is_whole)
COUNT = Kind("a whole number of at least 0", _is_count)
COUNT_OR_NONE = Kind("a whole number of at least 0, or None", lambda value: value is None or _is_count(value))
FLAG = Kind("True or False", lambda value: isinstance(value, bool))
TEXT = Kind("text", lambda value: isinstance(value, str))

SAMPLER = {"seed": WHOLE, "epoch": COUNT, "committed": COUNT, "length": COUNT}
LOADER = SAMPLER | {
    "version": WHOLE,
    "step": COUNT,
    "length": COUNT_OR_NONE,  # None: a stream
    "shuffle": FLAG,
    "order": TEXT,
    "manual_commit": FLAG,
}


class Ordered(Protocol):
    """What a position is compared with."""

    @property
    def length(self) -> int | None: ...

    def fingerprint(self, cursor: Cursor) -> str: ...


def check_fields(state: Mapping[str, Any], fields: Mapping[str, Kind], owner: str) -> None:
    """Raise UsageError if a field is missing or of another kind."""
    if not isinstance(state, Mapping):
        raise UsageError(f"the state of a {owner} must be a dict, as state_dict() gives it, got {state!r}")
    if state.get("version", VERSION) != VERSION:  # first: another version may have other fields
        raise UsageError(f"the {owner}'s state has version {state['version']!r}, expected {VERSION}")
    if missing := set(fields) - set(state):
        raise UsageError(f"this is no state of a {owner}: it lacks {', '.join(sorted(missing))}")
    for name, kind in fields.items():
        if not kind.fits(state[name]):
            raise UsageError(
                f"the {owner}'s state has {name}={state[name]!r}, expected {kind.words}; load what state_dict() gave, "
                f"or a checkpoint that holds it"
            )


def read_position(state: Mapping[str, Any], source: Ordered, shuffle: bool) -> Cursor:
    """The cursor of a Loader's state. Raises UsageError if here it would mean other samples."""
    check_fields(state, LOADER, "Loader")
    for name, here in (("length", source.length), ("shuffle", shuffle)):
        if state[name] != here:
            raise UsageError(
                f"the Loader's state was saved with {name}={state[name]!r}, here it is {here!r}: the same position "
                f"would mean other samples. Resume with the dataset and the settings it was saved with"
            )
    cursor = Cursor(*(operator.index(state[name]) for name in ("seed", "epoch", "committed")))
    if source.length is not None and cursor.committed > source.length:
        raise UsageError(
            f"the Loader's state has committed={cursor.committed}, expected at most length={source.length}: no epoch "
            f"has more samples"
        )
    if cursor.committed and source.fingerprint(cursor) != state["order"]:
        raise UsageError(
            f"the order of epoch {cursor.epoch} is not the one that the Loader's state was saved in the middle of, "
            f"though seed and length are equal: another version of torch draws other permutations. Resume with the "
            f"version it was saved with, or go on with the next epoch by set_epoch({cursor.epoch + 1})"
        )
    return cursor
