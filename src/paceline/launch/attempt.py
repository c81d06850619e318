"""One attempt: the processes of a job from their start until the last of them has exited."""

import contextlib
import selectors
import signal
import time
from collections.abc import Collection

from paceline.launch.failure import End
from paceline.launch.job import INTERRUPT_EXIT, STOPPED_EXIT, Job, JobFailure, JobOutcome, Listener
from paceline.launch.one_by_one import OneByOne
from paceline.launch.policy import AllOrNothing, Policy
from paceline.launch.rank_engine import RankEngine
from paceline.launch.rank_environment import environment_of
from paceline.launch.rank_processes import RankExited
from paceline.launch.rank_slot import RankLog, RankSlot
from paceline.launch.rank_watch import RankWatch
from paceline.launch.rehearsal import Rehearsal
from paceline.launch.reports import ProgressBoard
from paceline.launch.signals import PendingSignals
from paceline.phase import Phase
from paceline.process_status import signal_name
from paceline.rank_report import MEMBERSHIP_NAME, PROGRESS_NAME, REPORT_NAME

TICK_S = 0.05
WATCH_EVERY_S = 0.5
# Ctrl-C: how long ranks have to exit by themselves.
INTERRUPT_S = 5.0
LAST_READS = 256
REAPER_DIED = JobFailure((), 1, "the reaper process was killed, and the kernel killed the ranks with it")


class Attempt:
    """The processes and the loop that watches them. What a failure leads to is its policy's decision."""

    def __init__(
        self,
        job: Job,
        attempt: int,
        port: int,
        listener: Listener,
        signals: PendingSignals,
        rehearsal: Rehearsal,
        engine: RankEngine,
    ) -> None:
        self._engine = engine
        self.listener = listener
        self._job, self._attempt, self._port, self._signals = job, attempt, port, signals
        self._rehearsal = rehearsal
        self._policy: Policy = AllOrNothing(self, job.ranks)
        if job.elastic is not None:
            self._policy = OneByOne(self, job.elastic)
        self._logs: list[RankLog] = []
        self._slots: dict[int, RankSlot] = {}  # the newest process in each slot
        self._watch_at = 0.0
        self._tick_at = 0.0
        self._stopping_since: float | None = None
        self._kill_at: float | None = None
        self._kill_one_at: dict[RankSlot, float] = {}
        self._signal = 0
        self._passed_on = 0  # the last non-terminating signal

    def run(self) -> JobOutcome:
        """Start the policy's processes and return when the last one has exited and nothing of them is left."""
        with contextlib.ExitStack() as undo:
            self._selector = undo.enter_context(selectors.DefaultSelector())
            self._board = undo.enter_context(contextlib.closing(ProgressBoard(self._job.slots)))
            self._watch = RankWatch(range(self._job.slots), self._job.hang_timeout_s, self._board, self.listener.note)
            undo.callback(self._close)
            for rank in range(self._job.slots):
                log = RankLog(self._job.run_dir / f"rank_{rank}.log", bool(self._attempt), self.listener.note)
                self._logs.append(log)
                if self._attempt:
                    log.write(f"--- restart {self._attempt} ---\n".encode())
            self._processes = undo.enter_context(contextlib.closing(self._engine.open()))
            self._selector.register(self._processes, selectors.EVENT_READ)
            self._policy.begin(time.monotonic())
            while any(slot.end is None for slot in self._slots.values()):
                self._iterate()
            self._processes.close()
            self._drain()
            return self._outcome()

    def _close(self) -> None:
        for slot in self._slots.values():
            slot.close()
        for log in self._logs:
            log.close()

    # Called by the policy ----------------------------------------------------------------------------------------

    def start(self, rank: int, member: int | None = None) -> None:
        """Start a process in a slot that has none."""
        if rank in self._slots:
            self._retire(self._slots[rank])
            self._logs[rank].write(f"--- member {member} ---\n".encode())
            self._watch.forget(rank)
        self._slots[rank] = slot = RankSlot(rank, self._logs[rank], member)
        inherited = self._engine.environment
        environment = environment_of(self._job, rank, self._port, self._attempt, inherited, member)
        with slot.open_pipes() as theirs:
            named = {REPORT_NAME: theirs["report"], PROGRESS_NAME: self._board.descriptor}
            if member is not None:
                named[MEMBERSHIP_NAME] = theirs["membership"]
            self._processes.start(
                rank,
                self._job.command,
                environment | self._rehearsal.environment(),
                out=theirs["out"],
                err=theirs["err"],
                named=named,
                stdin=rank == 0,
            )
        for name, descriptor in slot.pipes.items():
            self._selector.register(descriptor, selectors.EVENT_READ, (slot, name))

    def tell(self, rank: int, line: bytes) -> None:
        """Write a line to a member."""
        self._slots[rank].tell(line)

    def step_of(self, rank: int) -> int:
        """The last step that a process has noted."""
        return self._board.read(rank).step

    def has_begun(self, rank: int) -> bool:
        """Whether a process has noted that it trains, and not only that it is starting or waiting."""
        return self._board.read(rank).phase not in (Phase.STARTING, Phase.IDLE, Phase.WAITING, Phase.DONE)

    def pass_on(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Send a non-terminating signal to some processes, or to all."""
        for rank in [None] if ranks is None else ranks:
            self._processes.signal(number, rank)
        self._passed_on = number

    def end(self, rank: int, now: float, within_s: float) -> None:
        """Ask one process to end, and kill it after a while."""
        slot = self._slots[rank]
        if slot.end is None and slot.asked_at is None:
            slot.asked_at = now
            self._kill_one_at[slot] = now + within_s
            self._processes.signal(signal.SIGTERM, rank)
            self._processes.signal(signal.SIGCONT, rank)

    def abort(self, ranks: Collection[int], now: float, within_s: float) -> None:
        """Make processes dump their threads' stacks and abort, and kill them after a while."""
        for rank in ranks:
            self._kill_one_at[self._slots[rank]] = now + within_s
            self._processes.abort(rank)

    def stop(self, now: float, number: int) -> None:
        """Ask all processes to end by a signal, and kill them after the job's shutdown timeout."""
        self._note_stopping(now)
        grace = self._job.shutdown_timeout_s
        kill_at = now + (min(INTERRUPT_S, grace) if number == signal.SIGINT else grace)
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        self._processes.signal(number)
        self._processes.signal(signal.SIGCONT)  # a stopped rank would not receive it

    def _note_stopping(self, now: float) -> None:
        if self._stopping_since is None:
            self._stopping_since = now
            self._policy.stopping(now)

    # The loop ------------------------------------------------------------------------------------------------------

    def _iterate(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            if key.data is None:
                self._handle_events()
                continue
            slot, pipe = key.data
            # Another process may have taken the slot meanwhile, with pipes of the same numbers.
            if slot.pipes.get(pipe) == key.fileobj and self._read(slot, pipe) == b"":
                self._selector.unregister(key.fileobj)
        now = time.monotonic()
        for slot in self._slots.values():
            self._show(slot, slot.out.idle(now), slot.err.idle(now))
            slot.tell()
        while (number := self._signals.next()) is not None:
            self._on_signal(number, now)
        self._policy.tick(now)
        if self._stopping_since is None and now >= self._watch_at:
            self._watch_at = now + WATCH_EVERY_S
            self._look_for_hangs(now)
        self._kill_overdue(now)
        if now >= self._tick_at:
            self._tick_at = now + TICK_S
            self._watch.tick(self._processes.living, self._policy.watched)
            self.listener.tick()

    def _kill_overdue(self, now: float) -> None:
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + 1.0
            self._processes.signal(signal.SIGKILL)
        for slot, at in list(self._kill_one_at.items()):
            if slot.end is not None:
                del self._kill_one_at[slot]
            elif now >= at:
                self._kill_one_at[slot] = now + 1.0
                self._processes.signal(signal.SIGKILL, slot.rank)

    def _read(self, slot: RankSlot, pipe: str) -> bytes | None:
        """Read available data: None if there is none yet, empty at the end of the pipe."""
        data, now = slot.read(pipe), time.monotonic()
        if not data:
            return data
        if pipe == "report":
            for kind, fields in slot.reports.feed(data):
                self._rehearsal.on_report(kind, fields)
                self._watch.on_report(slot.rank, kind, fields)
                if not self._policy.reported(slot.rank, kind, fields, now):
                    self.listener.reported(slot.rank, kind, fields)
        elif pipe == "out":
            self._show(slot, slot.out.feed(data, now), [])
        else:
            self._show(slot, [], slot.err.feed(data, now))
        return data

    def _show(self, slot: RankSlot, lines: list[str], error_lines: list[str]) -> None:
        for text in lines:
            self.listener.line(slot.rank, text)
        for text in error_lines:
            self.listener.error_line(slot.rank, text)

    def _read_all(self, slot: RankSlot) -> None:
        for pipe in slot.pipes:
            # Bounded, because a child of the rank that still writes is killed only later.
            for _ in range(LAST_READS):
                if not self._read(slot, pipe):
                    break

    def _retire(self, slot: RankSlot) -> None:
        """Another process takes the slot of one that has ended."""
        self._show_rest(slot)
        for descriptor in slot.pipes.values():
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        slot.close()

    def _show_rest(self, slot: RankSlot) -> None:
        self._read_all(slot)
        self._show(slot, slot.out.rest(), [*slot.err.idle(time.monotonic()), *slot.err.rest()])

    def _handle_events(self) -> None:
        for event in self._processes.events():
            if isinstance(event, RankExited):
                self._exited(self._slots[event.rank], event)
        if self._processes.unkillable:
            pids = ", ".join(map(str, self._processes.unkillable))
            self.listener.note(f"these rank processes could not be killed: {pids}")

    def _exited(self, slot: RankSlot, event: RankExited) -> None:
        self._read_all(slot)  # its last output precedes its exit
        now = time.monotonic()
        if event.with_reaper:
            self._note_stopping(now)  # none of them has failed on its own
        stopping = self._stopping_since if slot.asked_at is None else slot.asked_at
        killed = event.killed_by
        ours = stopping is not None and killed in (signal.SIGTERM, signal.SIGKILL)
        if killed and not ours and self._board.read(slot.rank).phase is Phase.DONE:
            # The interpreter crashed during exit. The script had returned, so no work has to be repeated.
            self.listener.note(
                f"rank {slot.rank} was killed by {signal_name(killed)} during exit, after its work was done"
            )
            killed = 0
        raised_at = slot.err.traceback_at
        # A rank that was already failing when it was asked to exit has failed on its own.
        by_itself = raised_at is not None and not killed and (stopping is None or raised_at < stopping)
        leaves = event.code == STOPPED_EXIT  # its scheduler may have asked it, not this launcher
        slot.end = end = End(
            rank=slot.rank,
            at=raised_at if by_itself and raised_at is not None else now,
            code=event.code,
            killed_by=killed,
            asked=(stopping is not None or leaves) and not by_itself,
            never=event.never,
            out_of_memory=event.out_of_memory,
            lost=event.lost,
            raised=raised_at is not None,
            tail=slot.tail(),
        )
        slot.err.hold_s = float("inf") if end.exit_code else 0.0
        self._policy.ended(end, now)

    def _on_signal(self, number: int, now: float) -> None:
        """The launcher has received a signal."""
        if number == signal.SIGUSR1:
            self._policy.notified(number)
        elif number == signal.SIGINT and self._signal == signal.SIGINT:
            self._kill_at = now
        else:
            self._signal = self._signal or number
            if number != signal.SIGINT and (said := self._watch.shortfall(self._job.shutdown_timeout_s)):
                self.listener.note(said)
            self.stop(now, number)

    def _look_for_hangs(self, now: float) -> None:
        if self._job.hang_timeout_s == 0:
            return
        if (hang := self._watch.look(now, self._processes, self._policy.watched)) is not None:
            self._policy.hung(hang, now)

    # The end -------------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        for slot in self._slots.values():
            self._show_rest(slot)
        self.listener.tick()

    def _outcome(self) -> JobOutcome:
        ends = [slot.end for slot in self._slots.values() if slot.end is not None]
        failure = self._policy.failure(ends) or (REAPER_DIED if self._processes.reaper_died else None)
        name = signal.Signals(self._signal).name if self._signal else ""
        if self._signal == signal.SIGINT:
            return JobOutcome(INTERRUPT_EXIT, failure, signal=name)
        if failure is not None:
            return JobOutcome(failure.exit_code, failure, signal=name, final=self._policy.is_final)
        # Ranks that obeyed a signal have not failed, but the job may not have done its work.
        counted = self._policy.count(ends)
        if not name and any(end.asked and end.exit_code == STOPPED_EXIT for end in counted):
            name = signal.Signals(self._passed_on or signal.SIGTERM).name
        return JobOutcome(next((end.exit_code for end in counted if end.exit_code), 0), signal=name)
