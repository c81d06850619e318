"""One attempt: the ranks from their start until the last of them has exited."""

import contextlib
import resource
import selectors
import signal
import time

from paceline.launch.failure import End, follows, root_cause
from paceline.launch.job import INTERRUPT_EXIT, Job, JobFailure, JobOutcome, Listener
from paceline.launch.rank_environment import environment_of
from paceline.launch.rank_processes import RankExited, RankProcesses
from paceline.launch.rank_slot import RankSlot
from paceline.launch.rank_watch import RankWatch
from paceline.launch.rehearsal import Rehearsal
from paceline.launch.reports import ProgressBoard
from paceline.launch.signals import PendingSignals
from paceline.launch.watchdog import Hang
from paceline.phase import Phase
from paceline.process_status import oom_kills, signal_name
from paceline.rank_report import PROGRESS_NAME, REPORT_NAME

TICK_S = 0.05
WATCH_EVERY_S = 0.5
# After a rank failed, others may fail for the same reason; after one that failed because of a peer, the peer's own
# failure must be on its way.
SAME_S = 0.5
BETTER_CAUSE_S = 3.0
# Ctrl-C: how long ranks have to exit by themselves.
INTERRUPT_S = 5.0
LAST_READS = 256
REAPER_DIED = JobFailure((), 1, "the reaper process was killed, and the kernel killed the ranks with it")


class Attempt:
    """The ranks and the loop that watches them."""

    def __init__(
        self, job: Job, attempt: int, port: int, listener: Listener, signals: PendingSignals, rehearsal: Rehearsal
    ) -> None:
        self._job, self._attempt, self._port, self._listener, self._signals = job, attempt, port, listener, signals
        self._rehearsal = rehearsal
        self._slots = [RankSlot(rank, job.run_dir / f"rank_{rank}.log", listener.note) for rank in range(job.ranks)]
        self._watch_at = 0.0
        self._tick_at = 0.0
        self._oom_kills = oom_kills()
        self._decide_at: float | None = None  # when waiting for more failures is over
        self._stopping_since: float | None = None
        self._kill_at: float | None = None
        self._signal = 0
        self._hang: Hang | None = None

    def run(self) -> JobOutcome:
        """Start all ranks and stay until the last one has exited; nothing of them is left then."""
        with contextlib.ExitStack() as undo:
            self._selector = undo.enter_context(selectors.DefaultSelector())
            self._board = undo.enter_context(contextlib.closing(ProgressBoard(self._job.ranks)))
            self._watch = RankWatch(range(self._job.ranks), self._job.hang_timeout_s, self._board, self._listener.note)
            for slot in self._slots:
                undo.callback(slot.close)
                slot.open_log(self._attempt)
            self._processes = undo.enter_context(contextlib.closing(RankProcesses()))
            self._selector.register(self._processes, selectors.EVENT_READ)
            for slot in self._slots:
                self._start(slot)
            while any(slot.end is None for slot in self._slots):
                self._iterate()
            self._processes.close()
            self._drain()
            return self._outcome()

    def _start(self, slot: RankSlot) -> None:
        with slot.open_pipes() as theirs:
            self._processes.start(
                slot.rank,
                self._job.command,
                environment_of(self._job, slot.rank, self._port, self._attempt) | self._rehearsal.environment(),
                out=theirs["out"],
                err=theirs["err"],
                named={REPORT_NAME: theirs["report"], PROGRESS_NAME: self._board.descriptor},
                stdin=slot.rank == 0,
            )
        for name, descriptor in slot.pipes.items():
            self._selector.register(descriptor, selectors.EVENT_READ, (slot, name))

    # The loop ------------------------------------------------------------------------------------------------------

    def _iterate(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            if key.data is None:
                self._handle_events()
            elif self._read(*key.data) == b"":
                self._selector.unregister(key.fileobj)
        now = time.monotonic()
        for slot in self._slots:
            self._show(slot, slot.out.idle(now), slot.err.idle(now))
        while (number := self._signals.next()) is not None:
            self._on_signal(number, now)
        if self._stopping_since is None:
            if self._decide_at is not None and now >= self._decide_at:
                self._stop(now, signal.SIGTERM)
            elif now >= self._watch_at:
                self._watch_at = now + WATCH_EVERY_S
                self._end_those_that_hang(now)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + 1.0
            self._processes.signal(signal.SIGKILL)
        if now >= self._tick_at:
            self._tick_at = now + TICK_S
            self._listener.tick()

    def _read(self, slot: RankSlot, pipe: str) -> bytes | None:
        """Read what has come: None when nothing has, empty when nothing ever will again."""
        data, now = slot.read(pipe), time.monotonic()
        if not data:
            return data
        if pipe == "report":
            for kind, fields in slot.reports.feed(data):
                self._rehearsal.heard(kind, fields)
                self._watch.heard(slot.rank, kind, fields)
                self._listener.reported(slot.rank, kind, fields)
        elif pipe == "out":
            self._show(slot, slot.out.feed(data, now), [])
        else:
            self._show(slot, [], slot.err.feed(data, now))
        return data

    def _show(self, slot: RankSlot, lines: list[str], error_lines: list[str]) -> None:
        for text in lines:
            self._listener.line(slot.rank, text)
        for text in error_lines:
            self._listener.error_line(slot.rank, text)

    def _read_all(self, slot: RankSlot) -> None:
        for pipe in slot.pipes:
            # Not for ever: a child of the rank that still writes is killed only later.
            for _ in range(LAST_READS):
                if not self._read(slot, pipe):
                    break

    def _handle_events(self) -> None:
        for event in self._processes.events():
            if isinstance(event, RankExited):
                self._exited(self._slots[event.rank], event)
        if self._processes.unkillable:
            pids = ", ".join(map(str, self._processes.unkillable))
            self._listener.note(f"these rank processes could not be killed: {pids}")

    def _exited(self, slot: RankSlot, event: RankExited) -> None:
        self._read_all(slot)  # its last output came before its exit
        now = time.monotonic()
        if event.with_reaper and self._stopping_since is None:
            self._stopping_since = now  # none of them has failed by itself
        killed, stopping = event.killed_by, self._stopping_since
        ours = stopping is not None and killed in (signal.SIGTERM, signal.SIGKILL)
        if killed and not ours and self._board.read(slot.rank).phase is Phase.DONE:
            # The interpreter crashed on its way out. The script had returned, so there is nothing to do again.
            self._listener.note(
                f"rank {slot.rank} was killed by {signal_name(killed)} during exit, after its work was done"
            )
            killed = 0
        raised_at = slot.err.traceback_at
        # A rank that was already failing when it was asked to exit has failed by itself.
        by_itself = raised_at is not None and not killed and (stopping is None or raised_at < stopping)
        slot.end = end = End(
            rank=slot.rank,
            at=raised_at if by_itself and raised_at is not None else now,
            code=event.code,
            killed_by=killed,
            asked=stopping is not None and not by_itself,
            never=event.never,
            out_of_memory=killed == signal.SIGKILL and oom_kills() > self._oom_kills,
            raised=raised_at is not None,
            tail=slot.tail(),
        )
        slot.err.hold_s = float("inf") if end.exit_code else 0.0
        if end.failed:
            due = now + (BETTER_CAUSE_S if follows(end) else SAME_S)
            self._decide_at = due if self._decide_at is None else min(self._decide_at, due)

    # Stopping ------------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, now: float) -> None:
        """A signal came to the launcher."""
        if number == signal.SIGUSR1:
            self._processes.signal(number)
        elif number == signal.SIGINT and self._signal == signal.SIGINT:
            self._kill_at = now
        else:
            self._signal = self._signal or number
            self._stop(now, number)

    def _stop(self, now: float, number: int) -> None:
        if self._stopping_since is None:
            self._stopping_since = now
        grace = self._job.shutdown_timeout_s
        kill_at = now + (min(INTERRUPT_S, grace) if number == signal.SIGINT else grace)
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        self._processes.signal(number)
        self._processes.signal(signal.SIGCONT)  # a stopped rank would not receive it

    def _end_those_that_hang(self, now: float) -> None:
        if self._job.hang_timeout_s == 0 or self._decide_at is not None:
            return
        living = {rank: pid for rank, pid in self._processes.living.items() if pid}
        self._hang = self._watch.look(now, living)
        if self._hang is None:
            return
        for rank in self._hang.ranks:
            # On this signal faulthandler writes where each thread is. A core dump, which may take minutes to write, is
            # not wanted.
            with contextlib.suppress(OSError):
                resource.prlimit(living[rank], resource.RLIMIT_CORE, (0, 0))
            self._processes.signal(signal.SIGABRT, rank)
            self._processes.signal(signal.SIGCONT, rank)
        self._decide_at = now + BETTER_CAUSE_S  # sooner, when they have exited

    # The end -------------------------------------------------------------------------------------------------------

    def _drain(self) -> None:
        for slot in self._slots:
            self._read_all(slot)
            self._show(slot, slot.out.rest(), [*slot.err.idle(time.monotonic()), *slot.err.rest()])
        self._listener.tick()

    def _outcome(self) -> JobOutcome:
        ends = [slot.end for slot in self._slots if slot.end is not None]
        failure = root_cause(ends, self._hang) or (REAPER_DIED if self._processes.reaper_died else None)
        name = signal.Signals(self._signal).name if self._signal else ""
        if self._signal == signal.SIGINT:
            return JobOutcome(INTERRUPT_EXIT, failure, signal=name)
        if failure is not None:
            return JobOutcome(failure.exit_code, failure, signal=name)
        # Ranks that obeyed a signal have not failed, but the job may not have done its work.
        return JobOutcome(next((end.exit_code for end in ends if end.exit_code), 0), signal=name)
