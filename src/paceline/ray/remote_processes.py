"""Ranks on the machines of a Ray cluster, in the place of `launch.rank_processes.RankProcesses`: the launcher's loop,
its pipes and its progress board are the same as for ranks of its own machine.

A thread drives the agents. Their events are written into the pipes and onto the board as the rank itself would do.
An agent that stops answering is given up: for the job its rank has ended, whatever it does.
"""

import contextlib
import mmap
import os
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from paceline.launch.lines import name_ranks
from paceline.launch.rank_processes import RankExited, RankStarted
from paceline.launch.reports import paste_notes
from paceline.process_status import ProcessStatus
from paceline.rank_report import MEMBER_NAME, MEMBERSHIP_NAME, PROGRESS_NAME, REPORT_NAME
from paceline.ray.pipe_ends import PipeEnds
from paceline.ray.places import Place, Places, describe_wait
from paceline.ray.rank_run import THIS_PYTHON, Event
from paceline.ray.remote_agent import BEAT_S, CLOSE_S, RemoteAgent, answer_of
from paceline.ray.variables import numbered, placed

TICK_MS = 100
# An agent that does not answer for this many beats is given up.
BEATS = 3
# After this long the job reports what it waits for; ranks that must start together are given up after ROOM_S.
SAY_AFTER_S = 10.0
ROOM_S = 600.0
RETRY_S = 1.0
CREATION = "creation task"  # in Ray's words for an actor whose constructor failed
ENDING = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@dataclass
class _Slot:
    """One slot of the job, with its agent and the newest process in it."""

    number: int
    agent: RemoteAgent | None = None
    place: Place | None = None  # of its first agent
    run: int = -1
    wanted: tuple[Sequence[str], Mapping[str, str], str] | None = None  # a process that is not started yet
    wanted_at: float = 0.0
    retry_at: float = 0.0
    ends: PipeEnds = field(default_factory=lambda: PipeEnds({}))


class RemoteProcesses:
    """The processes of all ranks. None of them outlives `close`, or the death of this process."""

    def __init__(self, places: Places, note: Callable[[str], None]) -> None:
        self.living: dict[int, int] = {}  # rank → process id on its machine, 0 while it is not known
        self.unkillable: list[int] = []
        self.reaper_died = False
        self._places = places
        self._note = note
        self._slots: dict[int, _Slot] = {}
        self._runs = 0
        self._statuses: dict[int, tuple[ProcessStatus, list[int]]] = {}
        self._posted: deque[Callable[[], None]] = deque()  # work for the thread
        self._events: deque[RankStarted | RankExited] = deque()
        self._readable, self._tell = os.pipe()
        self._wake, self._wakened = os.pipe()
        self._closing = False
        self._said: set[int] = set()
        self._thread = threading.Thread(target=self._serve, name="paceline-ray", daemon=True)
        self._thread.start()

    # In the place of RankProcesses ------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """Readable when there are events."""
        return self._readable

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        out: int,
        err: int,
        folder: Path | None = None,
        named: Mapping[str, int] | None = None,
        stdin: bool = False,
    ) -> None:
        """Start a rank, as soon as there is a place for it. None of them reads this process's standard input."""
        self.living[rank] = 0
        self._statuses.pop(rank, None)
        program = THIS_PYTHON if command[0] == sys.executable else command[0]
        where = str(folder or _own_folder())
        ends = PipeEnds({"out": out, "err": err, **(named or {})})
        self._post(lambda: self._want(rank, ([program, *command[1:]], environment, where), ends))

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to a rank, or to all of them."""
        self._post(lambda: self._signal(number, rank))

    def abort(self, rank: int) -> None:
        """Have a rank write where its threads are, and die."""
        self._post(lambda: self._call(self._slots[rank], "abort"))

    def status(self, rank: int) -> ProcessStatus:
        """The status of a rank from its machine's kernel."""
        return self._statuses.get(rank, (ProcessStatus("", 0.0), []))[0]

    def stopped_children(self, rank: int) -> list[int]:
        """The processes that a rank has started and that were stopped by a signal."""
        return self._statuses.get(rank, (ProcessStatus("", 0.0), []))[1]

    def events(self) -> list[RankStarted | RankExited]:
        """What has happened since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.set_blocking(self._readable, False)
            os.read(self._readable, 4096)
        found: list[RankStarted | RankExited] = []
        while self._events:
            event = self._events.popleft()
            found.append(event)
            if isinstance(event, RankStarted):
                self.living[event.rank] = event.pid
            else:
                self.living.pop(event.rank, None)
        return found

    def close(self) -> None:
        """End all agents and their processes, and wait for their end. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._post(lambda: None)
        self._thread.join()
        agents = [slot.agent for slot in self._slots.values() if slot.agent is not None]
        ending = [agent.close() for agent in agents if agent.place is not None]
        with contextlib.suppress(RayError):
            ray.wait(ending, num_returns=len(ending), timeout=CLOSE_S) if ending else None
        for agent in agents:
            agent.kill()
        for slot in self._slots.values():
            slot.ends.close()
        for descriptor in (self._readable, self._tell, self._wake, self._wakened):
            os.close(descriptor)

    # The thread -------------------------------------------------------------------------------------------------------

    def _post(self, act: Callable[[], None]) -> None:
        self._posted.append(act)
        os.write(self._wakened, b"\0")

    def _serve(self) -> None:
        looked_at = time.monotonic()
        while not self._closing:
            waiting = select.poll()
            waiting.register(self._wake, select.POLLIN)
            members = {slot.ends.descriptor(MEMBERSHIP_NAME): slot for slot in self._slots.values()}
            for descriptor in members.keys() - {-1}:
                waiting.register(descriptor, select.POLLIN)
            ready = {descriptor for descriptor, _ in waiting.poll(TICK_MS)}
            if self._wake in ready:
                os.read(self._wake, 4096)
            while self._posted:
                self._posted.popleft()()
            for descriptor, slot in members.items():
                if descriptor in ready and slot.ends.descriptor(MEMBERSHIP_NAME) == descriptor:
                    self._call(slot, "tell", slot.ends.read(MEMBERSHIP_NAME))
            now = time.monotonic()
            self._watch(now, paused_s=max(0.0, now - looked_at - BEAT_S))
            looked_at = now

    def _want(self, rank: int, wanted: tuple[Sequence[str], Mapping[str, str], str], ends: PipeEnds) -> None:
        """A process is to be started in a slot that has none."""
        slot = self._slots.setdefault(rank, _Slot(rank))
        slot.ends.close()
        slot.wanted, slot.ends, slot.run, self._runs = wanted, ends, self._runs, self._runs + 1
        slot.wanted_at = slot.retry_at = time.monotonic()
        self._start_those_placed()

    def _start_those_placed(self) -> None:
        """Start the ranks that must start together when Ray has placed them all; then any others."""
        together = [self._slots.get(number) for number in range(self._places.together)]
        if not all(slot is not None and slot.place is not None for slot in together):
            return
        for slot in self._slots.values():
            if slot.wanted is not None and slot.agent is not None and slot.agent.place is not None:
                self._start(slot, slot.agent, slot.agent.place)

    def _start(self, slot: _Slot, agent: RemoteAgent, here: Place) -> None:
        assert slot.wanted is not None
        (command, environment, folder), slot.wanted = slot.wanted, None
        places = {other.number: other.place for other in self._slots.values() if other.place is not None}
        places[slot.number] = here
        found = placed(environment, slot.number, places)
        if MEMBER_NAME not in environment:
            found.update(numbered(slot.number, places))
        agent.start(slot.run, command, found, folder)

    def _signal(self, number: int, rank: int | None) -> None:
        for slot in list(self._slots.values()):
            if rank in (None, slot.number):
                if slot.wanted is None:
                    self._call(slot, "signal", number)
                elif number in ENDING:
                    self._end(slot, RankExited(slot.number, killed_by=number))

    def _call(self, slot: _Slot, name: str, *arguments: Any) -> None:
        if slot.agent is not None and slot.wanted is None:
            slot.agent.call(name, slot.run, *arguments)

    # What agents answer -----------------------------------------------------------------------------------------------

    def _answered(self, agent: RemoteAgent, what: str, done: "Future[Any]") -> None:
        """Called in a thread of Ray's."""
        if not self._closing:
            self._post(lambda: self._take_in(agent, what, done))

    def _take_in(self, agent: RemoteAgent, what: str, done: "Future[Any]") -> None:
        slot = self._slots[agent.slot]
        if slot.agent is not agent:
            return  # it was given up, so its answer is too late
        found = answer_of(done)
        agent.heard_at = time.monotonic()
        if isinstance(found, RayError):
            self._failed(slot, agent, found)
        elif isinstance(found, dict):
            slot.place = agent.placed(found, agent.heard_at)
            self._said.discard(slot.number)
            self._start_those_placed()
        else:
            agent.poll()
            for event in found:
                self._happened(slot, agent, event)

    def _failed(self, slot: _Slot, agent: RemoteAgent, error: RayError) -> None:
        if agent.place is not None:
            self._lose(slot, agent, f"Ray says {type(error).__name__}")
        elif CREATION in str(error):
            self._lose(slot, agent, f"its agent failed: {_last_line(error)}")
        elif slot.wanted is not None:
            # Its place is on a machine that has just died. Ray will move it there where there is room.
            slot.agent = None
            slot.retry_at = agent.heard_at + RETRY_S

    def _happened(self, slot: _Slot, agent: RemoteAgent, event: Event) -> None:
        run, kind, what = event
        if run != slot.run or agent.place is None:
            return  # of a process that has ended
        if kind == "exited":
            self._end(slot, RankExited(**{**what, "rank": slot.number}))
        elif kind == "started":
            self._happen(RankStarted(slot.number, what))
        elif kind == "noted":
            self._paste(slot, what, agent.place.clock_ns)
        elif kind == "status":
            self._statuses[slot.number] = ProcessStatus(*what[0]), what[1]
        else:
            slot.ends.write(REPORT_NAME if kind == "report" else kind, what, lambda: self._closing)

    def _paste(self, slot: _Slot, noted: bytes, clock_ns: int) -> None:
        descriptor = slot.ends.descriptor(PROGRESS_NAME)
        if descriptor != -1:
            with mmap.mmap(descriptor, os.fstat(descriptor).st_size) as board:
                paste_notes(board, slot.number, noted, clock_ns)

    def _watch(self, now: float, paused_s: float) -> None:
        """Give up agents that are silent, and report what the job waits for."""
        late: list[int] = []
        for slot in list(self._slots.values()):
            if slot.agent is None and slot.wanted is not None and now >= slot.retry_at:
                slot.agent = RemoteAgent(slot.number, self._places.options(slot.number), self._answered, now)
            if slot.agent is None:
                continue
            slot.agent.heard_at += paused_s  # this process was stopped itself
            if slot.agent.place is None:
                late += self._await_room(slot, slot.agent, now)
            elif now - slot.agent.heard_at > BEATS * BEAT_S:
                self._lose(slot, slot.agent, f"no answer for {now - slot.agent.heard_at:.1f} s")
        if set(late) - self._said:
            self._said.update(late)
            self._note(describe_wait(late, self._places.needs, name_ranks(late)))

    def _await_room(self, slot: _Slot, agent: RemoteAgent, now: float) -> list[int]:
        """The slot, if it has waited for so long that this is to be said."""
        waited_s = now - slot.wanted_at
        if waited_s > ROOM_S and slot.number < self._places.together:
            self._lose(slot, agent, f"the cluster had no room for it within {ROOM_S:g} s")
            return []
        return [slot.number] if waited_s > SAY_AFTER_S else []

    def _lose(self, slot: _Slot, agent: RemoteAgent, why: str) -> None:
        slot.agent = None
        agent.kill()
        self._places.release(slot.number)
        if slot.ends.descriptor("out") == -1:
            return  # nothing ran in it
        if agent.place is None:
            self._end(slot, RankExited(slot.number, never=why, code=1))
        else:
            lost = f"its machine {agent.place.address}: {why}"
            self._end(slot, RankExited(slot.number, killed_by=signal.SIGKILL, lost=lost))

    def _end(self, slot: _Slot, exited: RankExited) -> None:
        slot.wanted, slot.run = None, -1
        slot.ends.close()
        self._happen(exited)

    def _happen(self, event: RankStarted | RankExited) -> None:
        self._events.append(event)
        os.write(self._tell, b"\0")


def _own_folder() -> str:
    """Where ranks run: here, if their machine has such a folder, or where Ray has put the driver's files."""
    shipped = ray.get_runtime_context().runtime_env.get("working_dir")
    return "" if shipped else str(Path.cwd())


def _last_line(error: RayError) -> str:
    return [line.strip() for line in str(error).splitlines() if line.strip()][-1]
