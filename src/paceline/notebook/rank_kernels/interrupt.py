"""Stopping a cell on all ranks, wherever they are in it.

**Three steps.** First the stock interrupt of a kernel: SIGINT to the rank and its child processes. Python code,
sleeps, children and paceline's waits end by that. A rank that is still busy a moment later is blocked in C++, in a
collective: its connections are severed (`rank/rank_group.py`), and the store over which ranks find each other is
made unreadable, since forming a group waits there and not on a connection. NCCL is aborted first, which ends its
kernels and takes a while; it would complain about connections and the store. In the end, all ranks form the next
generation of the group: what was in flight is lost, and so are the handles of the old group, but no variable is. This
is done after every interrupt, even if nothing had to be severed: one rank may have left a collective that another
never entered, and the next collective would meet the wrong partner.

A rank that catches KeyboardInterrupt, to save something, may take its time. It is named after two seconds. Only a
second request kills it.
"""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from paceline.launch.lines import name_ranks
from paceline.notebook.events import Noticed
from paceline.notebook.rank_kernels.connection import RankReply
from paceline.notebook.rank_kernels.message_pump import MessagePump

SEVER_AFTER_S = 0.03
SEVER_AFTER_ABORT_S = 0.8
PORTS_S = 0.12  # then connections are severed without the ports of ranks that do not reply
NAMED_AFTER_S = 2.0
KILLED_AFTER_S = 5.0


class Interruption:
    """One request to stop, until the last rank has stopped."""

    def __init__(self, pump: MessagePump, busy: Collection[int], store: Path, *, uses_nccl: bool, now: float) -> None:
        self._pump, self._store, self._began = pump, store, now
        self._abort_due, self._sever_due, self._named = uses_nccl, True, False
        self._sever_after_s = SEVER_AFTER_ABORT_S if uses_nccl else SEVER_AFTER_S
        self._kill_at: float | None = None
        self._interrupt(busy)
        self._ports = pump.send({rank: {"op": "ports"} for rank in pump.living()})

    def _interrupt(self, busy: Collection[int]) -> None:
        for rank in busy:
            self._pump.kernels[rank].send("control", "interrupt_request", {})

    def repeat(self, busy: Collection[int], now: float) -> None:
        """The user asks again."""
        self._interrupt(busy)
        if self._kill_at is None:
            self._kill_at = max(now, self._began + KILLED_AFTER_S)

    def step(self, busy: Collection[int], now: float) -> Noticed | None:
        """Take the next due step for the ranks that are still busy."""
        waited = now - self._began
        if not busy:
            return None
        if self._abort_due and waited >= SEVER_AFTER_S:
            self._abort_due = False
            abort_groups(self._pump, busy)
        late = waited - self._sever_after_s
        all_known = set(self._pump.living()) <= self._ports.replies.keys()
        if self._sever_due and late >= 0 and (all_known or late >= PORTS_S):
            self._sever_due = False
            close_store(self._store)
            for rank in busy:
                content = {"op": "sever", "peer_ports": ports_of_others(self._ports.replies, rank)}
                self._pump.kernels[rank].send("control", "paceline_request", content)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + KILLED_AFTER_S
            for rank in busy:
                self._pump.kill(rank)
        if self._named or waited < NAMED_AFTER_S:
            return None
        self._named = True
        then = "interrupt once more to kill" if self._kill_at is None else f"killing at {KILLED_AFTER_S:.0f} s"
        return Noticed(f"{name_ranks(busy)} did not stop within {waited:.0f} s; {then}")


def abort_groups(pump: MessagePump, ranks: Collection[int]) -> None:
    """Abort all NCCL work of these ranks."""
    for rank in ranks:
        pump.kernels[rank].send("control", "paceline_request", {"op": "abort"})


def ports_of_others(replies: Mapping[int, RankReply], rank: int) -> Sequence[int]:
    return sorted(
        {port for other, reply in replies.items() if other != rank for port in reply.content.get("ports", ())}
    )


def close_store(path: Path) -> None:
    """Free ranks that wait at the store: a link to itself cannot be opened, and torch raises instead of retrying.

    A missing file would be waited for. An existing file that is not a store ends the process when the store is
    released: torch checks whether it can be reached, and then writes to it.
    """
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    with contextlib.suppress(FileExistsError):
        path.symlink_to(path.name)
