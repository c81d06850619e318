"""One cell on some ranks, from the request until the last of them has come to its end."""

import builtins
import getpass
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.notebook.events import Died, Ended, Event, Failed, Noticed, View, Wrote
from paceline.notebook.fleet.interrupt import Interruption, close_store
from paceline.notebook.fleet.kernel import Cell
from paceline.notebook.fleet.patience import Patience
from paceline.notebook.fleet.raw_output import CHUNK
from paceline.notebook.fleet.stop import Stop
from paceline.notebook.fleet.switchboard import ALL, Heard, Switchboard
from paceline.notebook.fleet.translate import failed, from_iopub, from_reply

TICK_S = 0.05
BRISK_S = 0.01  # while ranks are being stopped
FREED_S = 1.0  # after a death, how long others have to find out by themselves


@dataclass(frozen=True)
class Outcome:
    """How a cell ended. `deaths` are also those of asked ranks that were dead before; then nothing was run."""

    failures: tuple[Failed, ...] = ()
    deaths: tuple[Died, ...] = ()
    interrupted: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class Group:
    """What a running cell must know of the generation it runs in."""

    store: Path
    uses_nccl: bool


class Running:
    """The loop. It runs on the thread that called it and leaves nothing running behind."""

    def __init__(self, board: Switchboard, view: View, group: Group, stop: Stop) -> None:
        self._board, self._view, self._group, self._stop = board, view, group, stop
        self._began = time.monotonic()
        self._busy: set[int] = set()
        self._failures: dict[int, Failed] = {}
        self._errors: dict[int, Mapping[str, Any]] = {}  # as the replies tell them
        self._deaths: list[Died] = []
        self._interruption: Interruption | None = None
        self._patience = Patience(board, self._began)
        self._obeyed = 0
        self._free_at: float | None = None
        self._read_at = 0.0

    def run(self, code: str, ranks: Sequence[int], count: int | None) -> Outcome:
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": True,
            "stop_on_error": False,  # or the next cell would be refused if it came at once
        }
        metadata = {} if count is None else {"paceline": {"count": count}}
        for rank in ranks:
            kernel = self._board.kernels[rank]
            self._board.keeping.begin_anew(rank)
            kernel.cell = Cell(kernel.send("shell", "execute_request", content, metadata=metadata))
            self._busy.add(rank)
        try:
            while self._busy:
                self._turn()
        except BaseException:
            for rank in self._busy:  # nobody listens any more
                self._board.kernels[rank].send("control", "interrupt_request", {})
            raise
        self._read_raw()
        return Outcome(
            tuple(self._failures[rank] for rank in sorted(self._failures)),
            tuple(self._deaths),
            self._stop.asked > 0,
            time.monotonic() - self._began,
        )

    def _turn(self) -> None:
        wait_s = TICK_S if self._interruption is None else BRISK_S
        for heard in self._board.turn(wait_s, ALL, self._stop):
            self._hear(heard)
        now = time.monotonic()
        self._take_deaths(now)
        if now - self._read_at >= TICK_S / 2:
            self._read_raw()
        for rank in sorted(self._busy):
            cell = self._board.kernels[rank].cell
            if cell is None or cell.is_over(now):
                self._end(rank)
        self._obey(now)
        if (text := self._patience.step(self._busy, now)) is not None:
            self._take(Noticed(text))
        self._view.tick(now)

    def _take(self, event: Event) -> None:
        self._view.take(event, time.monotonic())

    # What comes ----------------------------------------------------------------------------------------------------

    def _hear(self, heard: Heard) -> None:
        rank, message = heard.rank, heard.message
        cell = self._board.kernels[rank].cell
        if heard.channel == "iopub":
            event = from_iopub(rank, message, cell.message_id if cell else "")
            if isinstance(event, Failed):
                self._failures[rank] = event
            if event is not None:
                self._take(event)
        elif heard.channel == "stdin":
            self._give_input(heard)
        elif heard.channel == "control":
            self._patience.hear(heard)
            if self._interruption is not None:
                self._interruption.hear(heard)
        elif cell is not None and message["parent_header"].get("msg_id") == cell.message_id:
            for event in from_reply(rank, message["content"]):
                self._take(event)
            if message["content"].get("status") == "error":
                self._errors[rank] = message["content"]

    def _give_input(self, heard: Heard) -> None:
        """The rank asks, the user answers, as if the cell ran here."""
        content = heard.message["content"]
        asks = getpass.getpass if content.get("password") else builtins.input
        self._view.tick(time.monotonic())
        answer: str | None = None
        with self._stop.raises():
            try:
                answer = asks(f"[{heard.rank}] {content.get('prompt', '')}")
            except (EOFError, RuntimeError) as error:  # nobody is there to answer
                self._take(Noticed(f"rank {heard.rank} asks for input, and nobody can answer: {error}"))
        kernel = self._board.kernels[heard.rank]
        if answer is not None:
            kernel.send("stdin", "input_reply", {"value": answer, "status": "ok"})
        elif heard.rank in self._busy and self._stop.asked == self._obeyed:  # else the stop button does it
            kernel.send("control", "interrupt_request", {})

    def _read_raw(self) -> None:
        self._read_at = time.monotonic()
        for rank in self._board.living():
            for stream, raw in (("stdout", self._board.keeping.out), ("stderr", self._board.keeping.err)):
                left = raw[rank].unread()  # no more than that: a child may write faster than this reads
                while left > 0 and (text := raw[rank].read()):
                    self._take(Wrote(rank, stream, text))
                    left -= CHUNK

    # How it ends ---------------------------------------------------------------------------------------------------

    def _end(self, rank: int) -> None:
        self._busy.discard(rank)
        self._board.kernels[rank].cell = None
        if rank not in self._failures and rank in self._errors:
            self._failures[rank] = failed(rank, self._errors[rank])
            self._take(self._failures[rank])
        self._read_raw()
        self._take(Ended(rank))

    def _take_deaths(self, now: float) -> None:
        deaths, self._board.fresh_deaths = self._board.fresh_deaths, []
        for died in deaths:
            self._take(died)
            if died.rank in self._busy:  # the death of a rank that does not run the cell does not fail it
                self._deaths.append(died)
                self._busy.discard(died.rank)
                self._take(Ended(died.rank))
            self._free_at = now + FREED_S
        if self._free_at is not None and now >= self._free_at:
            self._free_at = None
            self._free_survivors()

    def _free_survivors(self) -> None:
        """The group is broken. gloo has noticed by now; what waits at the store or on a GPU would not."""
        close_store(self._group.store)
        if self._group.uses_nccl:
            for rank in self._busy:
                self._board.kernels[rank].send("control", "paceline_request", {"op": "abort"})

    def _obey(self, now: float) -> None:
        """The stop button."""
        if self._stop.asked > self._obeyed:
            self._obeyed = self._stop.asked
            if self._interruption is None:
                group = self._group
                self._interruption = Interruption(
                    self._board, self._busy, group.store, uses_nccl=group.uses_nccl, now=now
                )
            else:
                self._interruption.again(self._busy, now)
        if self._interruption is not None and (event := self._interruption.step(self._busy, now)) is not None:
            self._take(event)


def with_line_numbers(code: str, first_line: int) -> str:
    """The code with comments above it, so that its lines have the numbers that they have in the notebook's cell.

    IPython takes empty lines away. A cell magic must stand first, and counts its lines by itself.
    """
    lines = code.split("\n")
    empty = next((number for number, line in enumerate(lines) if line.strip()), 0)
    first = lines[empty]
    if first.lstrip().startswith("%%"):
        return code
    indent = first[: len(first) - len(first.lstrip())]  # IPython takes away what all lines have in common
    return f"{indent}#\n" * (first_line - 1 + empty) + "\n".join(lines[empty:])
