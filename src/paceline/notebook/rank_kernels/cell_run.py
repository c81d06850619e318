"""One cell on some ranks, from the request until the last of them has finished."""

import builtins
import getpass
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.notebook.events import Cleared, Died, Ended, Event, Failed, Noticed, Showed, View, Wrote
from paceline.notebook.rank_kernels.connection import CHANNELS, CellRequest, Message
from paceline.notebook.rank_kernels.interrupt import Interruption, abort_groups, close_store
from paceline.notebook.rank_kernels.message_pump import MessagePump, RankMessage, StopRequests
from paceline.notebook.rank_kernels.raw_output import CHUNK
from paceline.notebook.rank_kernels.waiting import WaitMonitor

TICK_S = 0.05
STOPPING_TICK_S = 0.01  # while ranks are being stopped
FREED_S = 1.0  # after a death, how long the others have to notice it themselves
# A widget needs its own kernel on the other side of its channel. Its text form is shown instead.
WIDGET = "application/vnd.jupyter.widget-view+json"


@dataclass(frozen=True)
class CellOutcome:
    """How a cell ended."""

    failures: tuple[Failed, ...] = ()
    deaths: tuple[Died, ...] = ()
    interrupted: bool = False
    seconds: float = 0.0


class CellRun:
    """The loop. It runs on the thread that called it and leaves nothing running behind."""

    def __init__(self, pump: MessagePump, view: View, stop: StopRequests, *, store: Path, uses_nccl: bool) -> None:
        self._pump, self._view, self._stop = pump, view, stop
        self._store, self._uses_nccl = store, uses_nccl
        self._began = time.monotonic()
        self._busy: set[int] = set()
        self._failures: dict[int, Failed] = {}
        self._deaths: list[Died] = []
        self._interruption: Interruption | None = None
        self._wait_monitor = WaitMonitor(pump, self._began)
        self._stops_handled = 0
        self._free_at: float | None = None
        self._read_at = 0.0

    def run(self, code: str, ranks: Sequence[int], count: int | None) -> CellOutcome:
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": True,
            "stop_on_error": False,  # otherwise the next cell would be refused if it followed at once
        }
        metadata = {} if count is None else {"paceline": {"count": count}}
        for rank in ranks:
            kernel = self._pump.kernels[rank]
            kernel.mark_start()
            kernel.cell = CellRequest(kernel.send("shell", "execute_request", content, metadata=metadata))
            self._busy.add(rank)
        try:
            while self._busy:
                self._turn()
        except BaseException:
            for rank in self._busy:  # no one listens any more
                self._pump.kernels[rank].send("control", "interrupt_request", {})
            raise
        self._read_raw_output()
        return CellOutcome(
            tuple(self._failures[rank] for rank in sorted(self._failures)),
            tuple(self._deaths),
            self._stop.asked > 0,
            time.monotonic() - self._began,
        )

    def _turn(self) -> None:
        wait_s = TICK_S if self._interruption is None else STOPPING_TICK_S
        for received in self._pump.poll(wait_s, CHANNELS, self._stop):
            self._receive(received)
        now = time.monotonic()
        self._take_deaths(now)
        if now - self._read_at >= TICK_S / 2:
            self._read_raw_output()
        for rank in sorted(self._busy):
            cell = self._pump.kernels[rank].cell
            if cell is None or cell.is_over(now):
                self._end(rank)
        self._handle_stop(now)
        if (text := self._wait_monitor.step(self._busy, now)) is not None:
            self._take(Noticed(text))
        self._view.tick(now)

    def _take(self, event: Event) -> None:
        self._view.take(event, time.monotonic())

    def _receive(self, received: RankMessage) -> None:
        rank, message = received.rank, received.message
        cell = self._pump.kernels[rank].cell
        if received.channel == "iopub":
            event = _event(rank, message, cell.message_id if cell else "")
            if isinstance(event, Failed):
                self._fail(event)
            elif event is not None:
                self._take(event)
        elif received.channel == "stdin":
            self._give_input(received)
        elif cell is not None and message["parent_header"].get("msg_id") == cell.message_id:
            for event in _shown_by_reply(rank, message["content"]):
                self._take(event)
            if message["content"].get("status") == "error":
                self._fail(_failed(rank, message["content"]))

    def _fail(self, event: Failed) -> None:
        """An error arrives on both channels or on one of them; the first one counts."""
        if event.rank not in self._failures:
            self._failures[event.rank] = event
            self._take(event)

    def _give_input(self, received: RankMessage) -> None:
        """The rank asks, and the user answers, as if the cell ran here."""
        content = received.message["content"]
        asks = getpass.getpass if content.get("password") else builtins.input
        self._view.tick(time.monotonic())
        answer: str | None = None
        with self._stop.suspended():
            try:
                answer = asks(f"[{received.rank}] {content.get('prompt', '')}")
            except (EOFError, RuntimeError) as error:  # there is no one to answer
                self._take(Noticed(f"rank {received.rank} asks for input, which cannot be given here: {error}"))
        kernel = self._pump.kernels[received.rank]
        if answer is not None:
            kernel.send("stdin", "input_reply", {"value": answer, "status": "ok"})
        elif received.rank in self._busy and self._stop.asked == self._stops_handled:  # else the stop button does it
            kernel.send("control", "interrupt_request", {})

    def _read_raw_output(self) -> None:
        self._read_at = time.monotonic()
        for rank in self._pump.living():
            kernel = self._pump.kernels[rank]
            for stream, raw in (("stdout", kernel.out), ("stderr", kernel.err)):
                left = raw.unread()  # no more than that: a child may write faster than this reads
                while left > 0 and (text := raw.read()):
                    self._take(Wrote(rank, stream, text))
                    left -= CHUNK

    def _end(self, rank: int) -> None:
        self._busy.discard(rank)
        self._pump.kernels[rank].cell = None
        self._read_raw_output()
        self._take(Ended(rank))

    def _take_deaths(self, now: float) -> None:
        deaths, self._pump.unreported_deaths = self._pump.unreported_deaths, []
        for died in deaths:
            self._take(died)
            if died.rank in self._busy:  # the death of a rank that does not run the cell does not fail it
                self._deaths.append(died)
                self._busy.discard(died.rank)
                self._take(Ended(died.rank))
            self._free_at = now + FREED_S
        if self._free_at is not None and now >= self._free_at:
            # The group is broken. gloo has noticed by now; a wait at the store or on a GPU would not.
            self._free_at = None
            close_store(self._store)
            if self._uses_nccl:
                abort_groups(self._pump, self._busy)

    def _handle_stop(self, now: float) -> None:
        if self._stop.asked > self._stops_handled:
            self._stops_handled = self._stop.asked
            if self._interruption is None:
                self._interruption = Interruption(
                    self._pump, self._busy, self._store, uses_nccl=self._uses_nccl, now=now
                )
            else:
                self._interruption.repeat(self._busy, now)
        if self._interruption is not None and (event := self._interruption.step(self._busy, now)) is not None:
            self._take(event)


def _event(rank: int, message: Message, cell: str) -> Event | None:
    """The event in a message that a kernel published. An error counts if it comes from the cell that runs."""
    content = message["content"]
    match message["msg_type"]:
        case "stream":
            return Wrote(rank, str(content.get("name", "stdout")), str(content.get("text", "")))
        case "execute_result" | "display_data" | "update_display_data" as kind:
            data = {mime: value for mime, value in _table(content, "data").items() if mime != WIDGET}
            name = _table(content, "transient").get("display_id")
            metadata, updates = _table(content, "metadata"), kind == "update_display_data"
            return Showed(rank, data, metadata, name if isinstance(name, str) else None, updates) if data else None
        case "clear_output":
            return Cleared(rank, bool(content.get("wait")))
        case "error" if message["parent_header"].get("msg_id") == cell:
            return _failed(rank, content)
        case _:
            return None


def _failed(rank: int, content: Mapping[str, Any]) -> Failed:
    name, value, traceback = content.get("ename", ""), content.get("evalue", ""), _list(content, "traceback")
    return Failed(rank, str(name), str(value), tuple(map(str, traceback)))


def _shown_by_reply(rank: int, content: Mapping[str, Any]) -> Iterator[Showed]:
    """What comes with the reply at the end of a cell: the pager that `len?` opens."""
    for payload in _list(content, "payload"):
        page = isinstance(payload, dict) and payload.get("source") == "page"
        if page and (text := _table(payload, "data").get("text/plain")):
            yield Showed(rank, {"text/plain": text}, {})


# User code can influence what a rank sends. A part of an unexpected type counts as missing.


def _table(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = content.get(name)
    return found if isinstance(found, dict) else {}


def _list(content: Mapping[str, Any], name: str) -> Sequence[Any]:
    found = content.get(name)
    return found if isinstance(found, list) else ()
