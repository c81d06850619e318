"""Which ranks `[0,2]`, `0:2`, `all` or `!0` selects."""

import re

from paceline.errors import UsageError
from paceline.launch.tracebacks import cut

_ALL = ("all", "*")
# Python limits the length of decimal numbers, and no world needs more digits than this.
_INDEX = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")
_SLICE = re.compile(r"([0-9]{0,18}):([0-9]{0,18})(?::([0-9]{1,18}))?")
_BETWEEN_NUMBERS = re.compile(r"(?<=[0-9])\s+(?=[0-9])")
_SHOWN = 60


def parse_ranks(text: str, size: int) -> tuple[int, ...]:
    """The ranks that `text` names in a world of `size`, each once and in order.

    One rank `0`, several `[0,2]` or `0 2`, a range `[0-2]` with both ends, a slice `0:2` without its end, `all` or
    `*`, and all but some `!0`, `![0,1]`. Brackets, spaces and comments do not matter.
    Raises UsageError, with the ranks that there are, for any other text, for ranks that do not exist, and if no rank
    is left.
    """
    given = text.partition("#")[0].strip()
    # Two numbers with a space between them are two ranks, and not one long number.
    plain = re.sub(r"\s+", "", _BETWEEN_NUMBERS.sub(",", given)).lower()
    wanted = _without_brackets(plain.removeprefix("!"))
    chosen = set(range(size)) if wanted in _ALL else _listed(wanted, given, size)
    if plain.startswith("!"):
        chosen = set(range(size)) - chosen
    if not chosen:
        raise UsageError(f"{cut(given, _SHOWN)} selects no rank: expected {_valid(size)}")
    return tuple(sorted(chosen))


def _without_brackets(text: str) -> str:
    inner = text[1:-1]
    return inner if text == f"[{inner}]" or text == f"({inner})" else text


def _listed(wanted: str, given: str, size: int) -> set[int]:
    # A comma may end the list, as it may in Python.
    spans = [_span(item, size) for item in wanted.removesuffix(",").split(",")]
    named = [span for span in spans if span is not None]
    if len(named) < len(spans):
        raise UsageError(
            f"expected {_valid(size)}, written as 0, [0,2], [0-2], 0:2, all or !0, got "
            f"{cut(given, _SHOWN) or 'nothing'}"
        )
    # Checked before the spans are expanded: a typo may have made one very long.
    highest = max((span[-1] for span in named if span), default=0)
    if highest >= size:
        raise UsageError(f"rank {highest} does not exist: expected {_valid(size)}, got {cut(given, _SHOWN)}")
    return {rank for span in named for rank in span}


def _span(item: str, size: int) -> range | None:
    """The ranks of one item of a list, whether they exist or not; None if the item cannot be read."""
    if _INDEX.fullmatch(item):
        return range(int(item), int(item) + 1)
    if ends := _RANGE.fullmatch(item):
        return range(int(ends[1]), int(ends[2]) + 1)
    if ends := _SLICE.fullmatch(item):
        step = int(ends[3] or 1)
        return range(int(ends[1] or 0), int(ends[2] or size), step) if step else None
    return None


def _valid(size: int) -> str:
    return "rank 0" if size == 1 else f"ranks of 0-{size - 1}"
