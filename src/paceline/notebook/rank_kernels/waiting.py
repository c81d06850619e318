"""Finds out, from time to time while a cell runs, which ranks wait for which, and reports it when they are stuck."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.launch.lines import name_ranks
from paceline.launch.tracebacks import cut
from paceline.notebook.rank_kernels.message_pump import MessagePump, PendingReplies

AT_S = (2.0, 9.0, 29.0, 99.0)
ANSWER_S = 0.5
# Ranks that train are in a collective half of the time. A rank that waits is still in the same one at the next check.
AGAIN_S = 1.0
# If all ranks are in the same call, they may just be moving many bytes.
ALL_TOGETHER_S = 25.0
MAX_SOURCE = 60
MAX_PLACES = 3

Positions = Mapping[int, Mapping[str, Any]]


class WaitMonitor:
    """Asks busy ranks for their positions when a cell has run for a while, and reports if some wait for others."""

    def __init__(self, pump: MessagePump, now: float) -> None:
        self._pump, self._began = pump, now
        self._due = [now + wait_s for wait_s in AT_S]
        self._asked: PendingReplies | None = None
        self._asked_at = now
        self._before: Positions | None = None  # their positions at the first check

    def step(self, busy: Collection[int], now: float) -> str | None:
        """The sentence to show now, if there is one."""
        asked = self._asked
        if asked is None:
            if self._due and now >= self._due[0]:
                self._due.pop(0)
                self._asked_at, self._asked = now, self._pump.send({rank: {"op": "position"} for rank in busy})
            return None
        if len(asked.replies) < len(asked.asked) and now - self._asked_at < ANSWER_S:
            return None
        self._asked = None
        silent = [rank for rank in asked.asked if rank in busy and rank not in asked.replies]
        found: Positions = {rank: reply.content for rank, reply in asked.replies.items() if rank in busy}
        idle = [rank for rank in self._pump.living() if rank not in busy]
        before, self._before = self._before, None
        if before is None:
            if describe_waits(found, idle, now - self._began, silent=silent) is not None:
                self._before = found
                self._due.insert(0, now + AGAIN_S)
            return None
        # A rank that is in another collective than before does not wait for anyone.
        stuck = {
            rank: position if before.get(rank) == position else {**position, "waits_in": None}
            for rank, position in found.items()
        }
        return describe_waits(stuck, idle, now - self._began, silent=silent)


@dataclass(frozen=True)
class Position:
    """Where the cell of a rank is. `waits_in` names what it waits in for other ranks: "all_reduce"."""

    line: int | None = None
    source: str = ""
    waits_in: str | None = None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Position":
        """From a rank's reply to "position"."""
        return cls(content.get("line"), content.get("source") or "", content.get("waits_in"))


def describe_waits(
    positions: Positions, idle: Collection[int], waited_s: float, *, silent: Collection[int] = ()
) -> str | None:
    """Which ranks wait for which, `waited_s` seconds after the cell began; None if none does.

    `positions` are what busy ranks replied to "position". `idle` ranks have finished the cell, or do not run it;
    `silent` ones did not reply.
    """
    found = {rank: Position.of(content) for rank, content in sorted(positions.items())}
    calls = _by_place((rank, position) for rank, position in found.items() if position.waits_in)
    busy = _by_place((rank, position) for rank, position in found.items() if not position.waits_in)
    if not calls:
        return None
    after = f"after {waited_s:.0f} s"
    who = []
    for position, ranks in list(calls.items())[:MAX_PLACES]:  # a longer sentence would be unreadable
        place = "" if position.line is None else f" (line {position.line})"
        who.append(f"{name_ranks(ranks)} {_verb(ranks, 'waits', 'wait')} in {position.waits_in}{place}")
    if idle or silent or busy:
        late = [f"{name_ranks(idle)}, which {_verb(idle, 'is', 'are')} idle"] if idle else []
        late += [f"{name_ranks(silent)}, which {_verb(silent, 'does', 'do')} not answer"] if silent else []
        return f"{after}, {' and '.join(who)} for {', and for '.join([*late, *_describe_busy(busy)])}"
    if len(calls) > 1:
        return f"{after}, ranks wait for each other: {' and '.join(who)}"
    return f"{after}, all ranks are in the same call: {who[0]}" if waited_s >= ALL_TOGETHER_S else None


def _by_place(positions: Iterable[tuple[int, Position]]) -> dict[Position, list[int]]:
    """Ranks grouped by the place where they are."""
    found: dict[Position, list[int]] = {}
    for rank, position in positions:
        found.setdefault(position, []).append(rank)
    return found


def _describe_busy(places: Mapping[Position, list[int]]) -> list[str]:
    found = []
    for position, ranks in list(places.items())[:MAX_PLACES]:
        source = f": {cut(position.source, MAX_SOURCE)}" if position.source else ""
        where = f"at line {position.line}{source}" if position.line is not None else "busy outside the cell's lines"
        found.append(f"{name_ranks(ranks)}, which {_verb(ranks, 'is', 'are')} {where}")
    elsewhere = sum(map(len, list(places.values())[MAX_PLACES:]))
    return [*found, f"{elsewhere} ranks elsewhere"] if elsewhere else found


def _verb(ranks: Collection[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many
