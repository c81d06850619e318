"""Who waits for whom, in one sentence, while a cell hangs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.launch.lines import name_ranks
from paceline.launch.tracebacks import cut

# All ranks in one and the same call may only be moving many bytes.
ALL_TOGETHER_S = 25.0
MAX_SOURCE = 60
MAX_PLACES = 3


@dataclass(frozen=True)
class Position:
    """Where the cell of a rank is. `waits_in` names what it waits in for other ranks: "all_reduce"."""

    line: int | None = None
    source: str = ""
    waits_in: str | None = None
    cell: int | None = None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Position":
        """From a rank's answer to "position"."""
        return cls(content.get("line"), content.get("source") or "", content.get("waits_in"), content.get("cell"))

    @property
    def place(self) -> str:
        return "" if self.line is None else f" (line {self.line})"


def notice(
    answers: Mapping[int, Mapping[str, Any]],
    idle: Collection[int],
    waited_s: float,
    *,
    silent: Collection[int] = (),
) -> str | None:
    """Who waits for whom, so many seconds after the cell began; None while nobody does.

    `answers` are what busy ranks said to "position". `idle` ranks have come to the end of the cell, or do not run it;
    `silent` ones did not say where they are.
    """
    positions = {rank: Position.of(content) for rank, content in answers.items()}
    waiting = {rank: position for rank, position in positions.items() if position.waits_in}
    if not waiting:
        return None
    busy = {rank: position for rank, position in positions.items() if not position.waits_in}
    calls = _by_place(waiting)
    after = f"after {waited_s:.0f} s"
    who = [_waits(ranks, position) for position, ranks in _first(calls)]
    if idle or silent or busy:
        late = [*_idle(idle), *_silent(silent), *_busy(busy)]
        return f"{after}, {' and '.join(who)} for {', and for '.join(late)}"
    if len(calls) > 1:
        return f"{after}, ranks wait for each other: {' and '.join(who)}"
    if waited_s < ALL_TOGETHER_S:
        return None
    return f"{after}, all ranks are in the same call: {who[0]}"


def _by_place(positions: Mapping[int, Position]) -> dict[Position, list[int]]:
    """Ranks at one place together, the lowest first."""
    found: dict[Position, list[int]] = {}
    for rank, position in sorted(positions.items()):
        found.setdefault(position, []).append(rank)
    return found


def _first(places: dict[Position, list[int]]) -> list[tuple[Position, list[int]]]:
    """A few places: a sentence that names more is not read."""
    return list(places.items())[:MAX_PLACES]


def _waits(ranks: list[int], position: Position) -> str:
    return f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {position.waits_in}{position.place}"


def _idle(ranks: Collection[int]) -> list[str]:
    return [f"{name_ranks(ranks)}, which {'is' if len(ranks) == 1 else 'are'} idle"] if ranks else []


def _silent(ranks: Collection[int]) -> list[str]:
    return [f"{name_ranks(ranks)}, which {'does' if len(ranks) == 1 else 'do'} not answer"] if ranks else []


def _busy(positions: Mapping[int, Position]) -> list[str]:
    places = _by_place(positions)
    found = []
    for position, ranks in _first(places):
        verb = "is" if len(ranks) == 1 else "are"
        source = f": {cut(position.source, MAX_SOURCE)}" if position.source else ""
        where = f"at line {position.line}{source}" if position.line is not None else "busy outside of the cell's lines"
        found.append(f"{name_ranks(ranks)}, which {verb} {where}")
    elsewhere = sum(map(len, places.values())) - sum(len(ranks) for _, ranks in _first(places))
    return [*found, f"{elsewhere} ranks elsewhere"] if elsewhere else found
