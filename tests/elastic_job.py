"""An elastic job of pool workers: the launcher's real coordinator, in a thread of the test, with processes that start
in milliseconds. `paceline run --ranks MIN:MAX` itself is tested in tests/procs/test_elastic_run.py.
"""

import json
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.launch.coordinator import Coordinator
from paceline.launch.elastic_actions import Action, Departure, EndMember, Formed, GiveUp, Loss, Lost, Spawn, Tell
from paceline.launch.job import ElasticTerms
from paceline.launch.reports import ReportReader
from paceline.member_messages import MemberReady, Refused, from_member, to_line
from tests.pool import Outcome, Pool

TICK_S = 0.01


@dataclass
class Job:
    """What became of a job."""

    outcomes: list[Outcome] = field(default_factory=list)  # by process, in the order of their start
    losses: list[Loss] = field(default_factory=list)
    formed: list[Formed] = field(default_factory=list)
    ready: list[MemberReady] = field(default_factory=list)
    gave_up: str = ""

    @property
    def values(self) -> list[Any]:
        """What the scripts of those have returned that came to their end."""
        return [outcome.value for outcome in self.outcomes if outcome.ok and outcome.value is not None]

    def check(self) -> None:
        """Raise what a script has raised."""
        for outcome in self.outcomes:
            if outcome.error is not None:
                raise outcome.error


def run_elastic(
    procs: Pool, folder: Path, script: Callable[..., Any], *args: Any, terms: ElasticTerms, processes: int
) -> Job:
    """Run script(member, *args) on the ranks of an elastic job that may start so many processes in all."""
    launcher = _Launcher(folder, terms, processes)
    launcher.start()
    try:
        launcher.job.outcomes = procs(processes).attempt(
            _be_member, str(folder), script.__module__, script.__qualname__, args, group=False
        )
    finally:
        launcher.over.set()
        launcher.join()
    return launcher.job


class _Launcher(threading.Thread):
    def __init__(self, folder: Path, terms: ElasticTerms, processes: int) -> None:
        super().__init__(name="test launcher")
        self.job = Job()
        self.over = threading.Event()
        self._terms = terms
        self._coordinator = Coordinator(terms)
        self._down: dict[int, int] = {}  # by member
        self._readers: dict[int, tuple[int, ReportReader]] = {}  # member and reports, by descriptor
        self._ups, self._downs = [], []
        for number in range(processes):
            for way in ("up", "down"):
                os.mkfifo(folder / f"{number}.{way}")
            self._ups.append(os.open(folder / f"{number}.up", os.O_RDONLY | os.O_NONBLOCK))
            self._downs.append(os.open(folder / f"{number}.down", os.O_RDWR))
        self._begun = 0

    def run(self) -> None:
        poll = select.poll()
        self._act(self._coordinator.start(time.monotonic()), poll)
        while not self.over.is_set():
            for descriptor, event in poll.poll(TICK_S * 1e3):
                self._read(descriptor, event, poll)
            self._act(self._coordinator.tick(time.monotonic()), poll)
            if not self._readers or self.job.gave_up:
                break
        for descriptor in self._downs:
            os.close(descriptor)
        for descriptor in self._ups:
            os.close(descriptor)

    def _read(self, descriptor: int, event: int, poll: "select.poll") -> None:
        member, reader = self._readers[descriptor]
        data = os.read(descriptor, 1 << 16) if event & select.POLLIN else b""
        if not data:
            poll.unregister(descriptor)
            del self._readers[descriptor]
            departure = Departure("has ended", -1, from_outside=True)
            self._act(self._coordinator.exited(member, departure, time.monotonic()), poll)
        for kind, fields in reader.feed(data):
            if (message := from_member(kind, fields)) is not None:
                if isinstance(message, MemberReady):
                    self.job.ready.append(message)
                self._act(self._coordinator.said(member, message, time.monotonic()), poll)

    def _act(self, actions: list[Action], poll: "select.poll") -> None:
        for action in actions:
            if isinstance(action, Spawn):
                self._spawn(action, poll)
            elif isinstance(action, Tell):
                os.write(self._down[action.member], to_line(action.message))
            elif isinstance(action, Lost):
                self.job.losses.append(action.loss)
            elif isinstance(action, Formed):
                self.job.formed.append(action)
            elif isinstance(action, GiveUp):
                self.job.gave_up = action.reason
            elif isinstance(action, EndMember) and action.member in self._down:  # a launcher would end its process
                os.write(self._down[action.member], to_line(Refused("the job is over")))

    def _spawn(self, action: Spawn, poll: "select.poll") -> None:
        if self._begun == len(self._ups):  # then nobody comes
            return
        number, self._begun = self._begun, self._begun + 1
        self._down[action.member] = self._downs[number]
        self._readers[self._ups[number]] = action.member, ReportReader()
        poll.register(self._ups[number], select.POLLIN)
        told = {"member": action.member, "slot": action.slot, "most": self._terms.maximum}
        os.write(self._downs[number], json.dumps(told).encode() + b"\n")


def _be_member(rank: int, size: int, folder: str, module: str, name: str, args: tuple[Any, ...]) -> Any:
    """In a worker: wait until this process is started, and run the script as a member."""
    import importlib

    from paceline.member import Member
    from paceline.rank_report import MEMBER_NAME, MEMBERSHIP_NAME, REPORT_NAME
    from paceline.replica.guard import guards
    from paceline.replica.live import all_replicas

    reading = os.open(f"{folder}/{rank}.down", os.O_RDONLY)
    told = b""
    while not told.endswith(b"\n"):
        byte = os.read(reading, 1)
        if not byte:
            os.close(reading)
            return None  # the job is over, and this process was never started
        told += byte
    place = json.loads(told)
    writing = os.open(f"{folder}/{rank}.up", os.O_WRONLY)
    os.environ.update(
        {
            MEMBER_NAME: str(place["member"]),
            MEMBERSHIP_NAME: f"{reading}:{os.fstat(reading).st_ino}",
            REPORT_NAME: f"{writing}:{os.fstat(writing).st_ino}",
            "LOCAL_RANK": str(place["slot"]),
            "RANK": str(place["slot"]),
            "WORLD_SIZE": str(place["most"]),
        }
    )
    script: Any = getattr(importlib.import_module(module), name)
    try:
        return script(place["member"], *args)
    finally:
        for replica in all_replicas():  # a script may leave replicas, and this process is used again
            replica._group.close()
        for guard in guards.live():
            guard.close()
        if Member._own is not None:
            Member._own.close()
            Member._own = None
        os.close(writing)
        os.close(reading)
