"""Who waits for whom, asked from time to time while a cell runs."""

from collections.abc import Collection, Mapping
from typing import Any

from paceline.notebook.switchboard import Heard, Switchboard
from paceline.notebook.waiting import notice

AT_S = (3.0, 10.0, 30.0, 100.0)
ANSWER_S = 0.5


class Patience:
    """Asks busy ranks where they are when a cell has run for a while, and says so if some wait for others."""

    def __init__(self, board: Switchboard, now: float) -> None:
        self._board, self._began = board, now
        self._due = list(AT_S)
        self._asked: dict[int, str] = {}
        self._asked_at = now
        self._positions: dict[int, Mapping[str, Any]] = {}

    def hear(self, heard: Heard) -> None:
        if heard.message["parent_header"].get("msg_id") == self._asked.get(heard.rank):
            self._positions[heard.rank] = heard.message["content"]

    def step(self, busy: Collection[int], now: float) -> str | None:
        """What there is to say now."""
        if self._due and now - self._began >= self._due[0]:
            self._due.pop(0)
            self._asked_at, self._positions = now, {}
            self._asked = {
                rank: self._board.kernels[rank].send("control", "paceline_request", {"op": "position"}) for rank in busy
            }
        if not self._asked or (len(self._positions) < len(self._asked) and now - self._asked_at < ANSWER_S):
            return None
        silent = [rank for rank in self._asked if rank in busy and rank not in self._positions]
        self._asked = {}
        positions = {rank: position for rank, position in self._positions.items() if rank in busy}
        idle = [rank for rank in self._board.living() if rank not in busy]
        return notice(positions, idle, now - self._began, silent=silent)
