"""Stopping a cell on all ranks, wherever they are in it.

**Three steps.** First the stock interrupt of a kernel: SIGINT to the rank and what it has started. Python code, sleeps,
children and the waits of paceline end by that. Who is still busy a moment later is blocked in C++, in a collective: its
wires are cut (`rank/wires.py`), and the store over which ranks find each other is made unreadable, since forming a
group waits there and not at a wire. NCCL is aborted first, which ends its kernels and takes a while; it would complain
about wires and the store. In the end, all ranks form the next generation of the group: what was in flight is lost, and
so are the handles of the old group, but not a variable. That is done after every interrupt, also when no wire had to be
cut: one rank may have left a collective that another never began, and the next one would meet the wrong partner.

A rank that catches KeyboardInterrupt, to save something, may take its time. It is named after two seconds. Only a
second request kills.
"""

import contextlib
from collections.abc import Collection
from pathlib import Path

from paceline.notebook.events import Noticed
from paceline.notebook.fleet.switchboard import Heard, Switchboard

CUT_AFTER_S = 0.03
CUT_AFTER_ABORT_S = 0.8
PORTS_S = 0.12  # then wires are cut without the ports of ranks that do not answer
NAMED_AFTER_S = 2.0
KILLED_AFTER_S = 5.0


class Interruption:
    """One request to stop, until the last rank has stopped."""

    def __init__(self, board: Switchboard, busy: Collection[int], store: Path, *, uses_nccl: bool, now: float) -> None:
        self._board, self._store, self._began = board, store, now
        self._ports: dict[int, list[int]] = {}
        self._abort_due, self._cut_due, self._named = uses_nccl, True, False
        self._cut_after_s = CUT_AFTER_ABORT_S if uses_nccl else CUT_AFTER_S
        self._kill_at: float | None = None
        for rank in busy:
            board.kernels[rank].send("control", "interrupt_request", {})
        self._asked = {
            rank: board.kernels[rank].send("control", "paceline_request", {"op": "ports"}) for rank in board.living()
        }

    def again(self, busy: Collection[int], now: float) -> None:
        """The user asks once more."""
        for rank in busy:
            self._board.kernels[rank].send("control", "interrupt_request", {})
        if self._kill_at is None:
            self._kill_at = max(now, self._began + KILLED_AFTER_S)

    def hear(self, heard: Heard) -> None:
        if heard.message["parent_header"].get("msg_id") == self._asked.get(heard.rank):
            self._ports[heard.rank] = heard.message["content"].get("ports", [])

    def step(self, busy: Collection[int], now: float) -> Noticed | None:
        """Do what is due for the ranks that are still busy."""
        waited = now - self._began
        if not busy:
            return None
        if self._abort_due and waited >= CUT_AFTER_S:
            self._abort_due = False
            for rank in busy:
                self._board.kernels[rank].send("control", "paceline_request", {"op": "abort"})
        late = waited - self._cut_after_s
        if self._cut_due and late >= 0 and (self._all_known() or late >= PORTS_S):
            self._cut_due = False
            self._cut_wires(busy)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + KILLED_AFTER_S
            for rank in busy:
                self._board.keeping.kill(rank)
        if not self._named and waited >= NAMED_AFTER_S:
            self._named = True
            return Noticed(self._names(busy, waited))
        return None

    def _all_known(self) -> bool:
        return set(self._board.living()) <= self._ports.keys()

    def _cut_wires(self, busy: Collection[int]) -> None:
        close_store(self._store)
        for rank in busy:
            content = {"op": "cut", "theirs": ports_of_others(self._ports, rank)}
            self._board.kernels[rank].send("control", "paceline_request", content)

    def _names(self, busy: Collection[int], waited: float) -> str:
        names = " and ".join(f"rank {rank}" for rank in sorted(busy))
        if self._kill_at is not None:
            return f"{names} did not stop within {waited:.0f} s; killed at {KILLED_AFTER_S:.0f} s"
        return f"{names} did not stop within {waited:.0f} s; interrupt once more to kill"


def ports_of_others(ports: dict[int, list[int]], rank: int) -> list[int]:
    return sorted({port for other, theirs in ports.items() if other != rank for port in theirs})


def close_store(path: Path) -> None:
    """Free whoever waits at the store: a link to itself cannot be opened, and torch raises instead of trying again.

    A file that is missing would be waited for. One that is there, but is no store, ends the process when the store is
    given back: torch looks whether it can be reached, and writes to it then.
    """
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with contextlib.suppress(FileExistsError):
        path.symlink_to(path.name)
