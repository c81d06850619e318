"""Who waits for whom, asked from time to time while a cell runs."""

from collections.abc import Collection, Mapping
from typing import Any

from paceline.notebook.fleet.switchboard import Heard, Switchboard
from paceline.notebook.fleet.waiting import notice

AT_S = (2.0, 9.0, 29.0, 99.0)
ANSWER_S = 0.5
# Ranks that train are in a collective half of the time. Who waits is there, in the same one, also when asked again.
AGAIN_S = 1.0

Positions = dict[int, Mapping[str, Any]]


class Patience:
    """Asks busy ranks where they are when a cell has run for a while, and says so if some wait for others."""

    def __init__(self, board: Switchboard, now: float) -> None:
        self._board, self._began = board, now
        self._due = [now + wait_s for wait_s in AT_S]
        self._asked: dict[int, str] = {}
        self._asked_at = now
        self._positions: Positions = {}
        self._before: Positions | None = None  # where they were when they were first asked

    def hear(self, heard: Heard) -> None:
        if heard.message["parent_header"].get("msg_id") == self._asked.get(heard.rank):
            self._positions[heard.rank] = heard.message["content"]

    def step(self, busy: Collection[int], now: float) -> str | None:
        """What there is to say now."""
        if not self._asked:
            if self._due and now >= self._due[0]:
                self._due.pop(0)
                self._ask(busy, now)
            return None
        if len(self._positions) < len(self._asked) and now - self._asked_at < ANSWER_S:
            return None
        silent = [rank for rank in self._asked if rank in busy and rank not in self._positions]
        self._asked = {}
        found = {rank: position for rank, position in self._positions.items() if rank in busy}
        idle = [rank for rank in self._board.living() if rank not in busy]
        before, self._before = self._before, None
        if before is None:
            if notice(found, idle, now - self._began, silent=silent) is not None:
                self._before = found
                self._due.insert(0, now + AGAIN_S)
            return None
        stuck = {
            rank: _moving(position) if before.get(rank) != position else position for rank, position in found.items()
        }
        return notice(stuck, idle, now - self._began, silent=silent)

    def _ask(self, busy: Collection[int], now: float) -> None:
        self._asked_at, self._positions = now, {}
        self._asked = {
            rank: self._board.kernels[rank].send("control", "paceline_request", {"op": "position"}) for rank in busy
        }


def _moving(position: Mapping[str, Any]) -> Mapping[str, Any]:
    """A rank that is in another collective than before does not wait for anyone."""
    return {**position, "waits_in": None}
