"""One attempt: the ranks of this machine from their start until the last of them has ended."""

import contextlib
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.launch.failure import End, follows, judge, signal_name
from paceline.launch.job import INTERRUPT_EXIT, Failure, HearsErrors, HearsNotes, Job, Listener
from paceline.launch.orphans import end_sessions
from paceline.launch.rank import Rank
from paceline.launch.requests import Requests
from paceline.launch.seat import SECRET_NAME, Seat, environment_of
from paceline.launch.vitals import kills_for_memory, look_at
from paceline.launch.watchdog import Hang, Watchdog
from paceline.progress import Phase, ProgressBoard

TICK_S = 0.05
WATCH_EVERY_S = 0.5
# After a rank failed, the others may fail of the same thing; after one that fell because of a peer, the peer must be
# on its way.
SAME_S = 0.5
BETTER_CAUSE_S = 3.0
# Ctrl-C: how long ranks have to leave by themselves.
INTERRUPT_S = 5.0
KEEPER_S = 10.0
LAST_READS = 256
KEEPER_GONE = Failure(
    (), "keeper", 1, "the process that keeps the ranks was killed, and the kernel has ended the ranks with it"
)


class _KeeperGone(Exception):
    """There is nobody on the other end of the control socket."""


class Remote(Protocol):
    """What an attempt must know of other machines."""

    def stop_asked(self) -> bool:
        """Whether this machine's ranks are to end because of another machine."""

    def failed(self, failure: Failure) -> None:
        """Tell the other machines at once that something failed here."""


@dataclass(frozen=True)
class Result:
    """How an attempt ended on this machine. `signal` is the one that ended it from outside, or 0."""

    failure: Failure | None
    exit_code: int
    signal: int = 0


class Attempt:
    """The ranks, their keeper, and the loop that watches them."""

    def __init__(self, job: Job, seat: Seat, listener: Listener, requests: Requests, remote: Remote) -> None:
        self._job, self._seat, self._listener, self._requests, self._remote = job, seat, listener, requests, remote
        self._error_line = listener.error_line if isinstance(listener, HearsErrors) else listener.line
        numbers = [seat.first_rank + local for local in range(job.ranks)]
        self._ranks = [Rank(local, rank, job.run_dir / f"rank_{rank}.log") for local, rank in enumerate(numbers)]
        self._board = ProgressBoard.create(job.ranks)
        self._watchdog = Watchdog(range(job.ranks), job.hang_timeout_s, whole=job.nodes == 1)
        self._watch_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._words = b""
        self._killed_for_memory = kills_for_memory()
        self._judge_at: float | None = None  # when waiting for more failures is over
        self._stopping_since: float | None = None
        self._kill_at: float | None = None
        self._signal = 0
        self._hang: Hang | None = None
        self._keeper_gone = False
        self._tick_at = 0.0

    def run(self) -> Result:
        """Start all ranks and stay until the last one has ended; nothing of them is left then."""
        mine, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(self._close)
            undo.callback(mine.close)
            self._control = mine
            with theirs:
                keeper = self._start_keeper(theirs)
            undo.callback(self._dismiss, keeper)
            try:
                self._start_ranks()
                place = {"first_rank": self._seat.first_rank, "world_size": self._seat.world_size}
                self._listener.told(self._seat.first_rank, "placed", {**place, "attempt": self._seat.attempt})
                self._selector.register(mine, selectors.EVENT_READ, self._hear_keeper)
                while any(rank.end is None for rank in self._ranks):
                    self._turn()
            except _KeeperGone:
                self._outlive_keeper()
            self._dismiss(keeper)
            self._drain()
            return self._result()

    # Starting ------------------------------------------------------------------------------------------------------

    def _start_keeper(self, theirs: socket.socket) -> "subprocess.Popen[bytes]":
        handed = [theirs.fileno(), self._board.descriptor]
        for rank in self._ranks:
            handed += rank.open(self._seat.attempt)
        # Isolated, and without site packages: what breaks the training's environment does not break the keeper's.
        script = str(Path(__file__).with_name("keeper.py"))
        command = [sys.executable, "-I", "-S", script, str(theirs.fileno())]
        environment = {name: value for name, value in os.environ.items() if name != SECRET_NAME}
        return subprocess.Popen(command, pass_fds=handed, start_new_session=True, env=environment)

    def _start_ranks(self) -> None:
        for rank in self._ranks:
            told, board = rank.tell_name, self._board.name
            self._say(
                rank=rank.local,
                command=self._job.command,
                environment=environment_of(self._job, self._seat, rank.local, told, board),
                folder=None if self._job.folder is None else str(self._job.folder),
                stdin=rank.local == 0,
                out=rank.outer.out,
                err=rank.outer.err,
                keep=[rank.outer.told, self._board.descriptor],
                shared=[self._board.descriptor],
            )
            rank.hand_over()
            for stream in ("out", "err", "told"):
                self._selector.register(getattr(rank.inner, stream), selectors.EVENT_READ, self._reader(rank, stream))

    def _reader(self, rank: Rank, stream: str) -> Callable[[], None]:
        def read() -> None:
            if self._read(rank, stream) == b"":
                self._selector.unregister(getattr(rank.inner, stream))

        return read

    # The loop ------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        for key, _ in self._selector.select(TICK_S):
            key.data()
        now = time.monotonic()
        for rank in self._ranks:
            for text in rank.out_lines.idle(now):
                self._listener.line(rank.rank, text)
            for text in rank.late(now):
                self._error_line(rank.rank, text)
        while (number := self._requests.next()) is not None:
            self._obey(number, now)
        if self._stopping_since is None:
            if self._remote.stop_asked():
                self._stop(now, signal.SIGTERM)
            elif self._judge_at is not None and now >= self._judge_at:
                self._give_up(now)
            elif now >= self._watch_at:
                self._watch_at = now + WATCH_EVERY_S
                self._watch(now)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + 1.0
            self._pass_on(signal.SIGKILL)
        if now >= self._tick_at:
            self._tick_at = now + TICK_S
            self._listener.tick()

    def _read(self, rank: Rank, stream: str) -> bytes | None:
        """Take in what has come: None when nothing has, empty when nothing ever will again."""
        data, now = rank.read(stream), time.monotonic()
        if stream == "told":
            for told in rank.tells.feed(data or b""):
                self._listener.told(rank.rank, told.kind, told.fields)
        elif stream == "out":
            for text in rank.note_out(data, now):
                self._listener.line(rank.rank, text)
        else:
            for text in rank.note_err(data, now):
                self._error_line(rank.rank, text)
        self._note_problem(rank)
        return data

    def _note_problem(self, rank: Rank) -> None:
        if rank.problem:
            self._note(rank.problem)
        rank.problem = ""

    def _note(self, text: str) -> None:
        if isinstance(self._listener, HearsNotes):
            self._listener.note(text)

    def _read_all(self, rank: Rank) -> None:
        for stream in ("told", "out", "err"):
            # Not for ever: a child of the rank that still writes is killed only later.
            for _ in range(LAST_READS):
                if not self._read(rank, stream):
                    break

    def _hear_keeper(self) -> None:
        try:
            data = self._control.recv(1 << 16)
        except OSError as error:
            raise _KeeperGone from error
        if not data:
            raise _KeeperGone
        *lines, self._words = (self._words + data).split(b"\n")
        for line in lines:
            word: dict[str, Any] = json.loads(line)
            rank = self._ranks[word["rank"]]
            if "pid" in word:
                rank.pid = word["pid"]
            else:
                self._ended(rank, word)

    def _ended(self, rank: Rank, word: dict[str, Any]) -> None:
        self._read_all(rank)  # its last words came before its end
        now = time.monotonic()
        killed = word.get("killed", 0)
        ours = self._stopping_since is not None and killed in (signal.SIGTERM, signal.SIGKILL)
        if killed and not ours and self._board.read(rank.local).phase is Phase.DONE:
            # The interpreter crashed on its way out. The script had returned, so there is nothing to do again.
            self._note(f"rank {rank.rank} was ended by {signal_name(killed)} while it exited, after its work was done")
            killed = 0
        cried_at = rank.cried_at
        # A rank that was already falling when it was told to end has fallen by itself.
        own_way = cried_at is not None and not killed
        own_way = own_way and (self._stopping_since is None or (cried_at or now) < self._stopping_since)
        end = End(
            rank=rank.rank,
            at=cried_at if own_way and cried_at is not None else now,
            code=word.get("code", 0),
            killed_by=killed,
            asked=self._stopping_since is not None and not own_way,
            never=word.get("never", ""),
            out_of_memory=killed == signal.SIGKILL and kills_for_memory() > self._killed_for_memory,
            raised=cried_at is not None,
            tail=rank.tail(),
            step=rank.step(self._board),
        )
        rank.end = end
        if end.failed:
            due = now + (BETTER_CAUSE_S if follows(end) else SAME_S)
            self._judge_at = due if self._judge_at is None else min(self._judge_at, due)

    # Stopping ------------------------------------------------------------------------------------------------------

    def _obey(self, number: int, now: float) -> None:
        """A signal came to the launcher."""
        if number == signal.SIGUSR1:
            self._pass_on(number)
        elif number == signal.SIGINT and self._signal == signal.SIGINT:
            self._kill_at = now
        else:
            self._signal = self._signal or number
            self._stop(now, number)

    def _give_up(self, now: float) -> None:
        failure = judge([rank.end for rank in self._ranks if rank.end is not None])
        if failure is not None and self._hang is None:
            self._remote.failed(failure)
        self._stop(now, signal.SIGTERM)

    def _stop(self, now: float, number: int) -> None:
        if self._stopping_since is None:
            self._stopping_since = now
        grace = self._job.shutdown_timeout_s
        kill_at = now + (min(INTERRUPT_S, grace) if number == signal.SIGINT else grace)
        self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)
        self._pass_on(number)
        self._pass_on(signal.SIGCONT)  # a stopped rank would not hear it

    def _watch(self, now: float) -> None:
        if self._job.hang_timeout_s == 0 or self._judge_at is not None:
            return
        living = [rank for rank in self._ranks if rank.end is None and rank.pid]
        marks = {rank.local: self._board.read(rank.local) for rank in living}
        vitals = {rank.local: look_at(rank.pid) for rank in living}
        self._hang = self._watchdog.look(now, marks, vitals)
        if self._hang is not None:
            self._end_hang(self._hang, now)

    def _end_hang(self, hang: Hang, now: float) -> None:
        failure = judge([], hang, self._seat.first_rank)
        assert failure is not None
        self._remote.failed(failure)
        for local in hang.ranks:
            # faulthandler writes where each thread stands when this signal comes. A core, which may take minutes to
            # write, is not wanted.
            with contextlib.suppress(OSError):
                resource.prlimit(self._ranks[local].pid, resource.RLIMIT_CORE, (0, 0))
            self._say(signal=int(signal.SIGABRT), rank=local)
            self._say(signal=int(signal.SIGCONT), rank=local)
        self._judge_at = now + BETTER_CAUSE_S  # sooner, when they have ended

    def _pass_on(self, number: int) -> None:
        self._say(signal=int(number), rank=None)

    def _say(self, **word: object) -> None:
        try:
            self._control.sendall(json.dumps(word).encode() + b"\n")
        except OSError as error:
            raise _KeeperGone from error

    # The end -------------------------------------------------------------------------------------------------------

    def _outlive_keeper(self) -> None:
        """The keeper was killed. Its ranks die with it; wait until they have, or they would meet the next attempt."""
        with contextlib.suppress(_KeeperGone):
            while True:  # what it said before its end
                self._hear_keeper()
        living = [rank for rank in self._ranks if rank.end is None]
        self._keeper_gone = bool(living)
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
        left = end_sessions([rank.pid for rank in living if rank.pid])
        if left:
            self._note(f"processes of the ranks that do not end: {', '.join(map(str, left))}")
        for rank in living:
            self._ended(rank, {"killed": int(signal.SIGKILL)})

    def _dismiss(self, keeper: "subprocess.Popen[bytes]") -> None:
        """The keeper kills what is left of the ranks, and goes."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
        try:
            keeper.wait(KEEPER_S)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()

    def _drain(self) -> None:
        for rank in self._ranks:
            self._read_all(rank)
            for text in rank.out_lines.rest():
                self._listener.line(rank.rank, text)
            for text in (*rank.release(time.monotonic()), *rank.err_lines.rest()):
                self._error_line(rank.rank, text)
        self._listener.tick()

    def _result(self) -> Result:
        ends = [rank.end for rank in self._ranks if rank.end is not None]
        failure = judge(ends, self._hang, self._seat.first_rank) or (KEEPER_GONE if self._keeper_gone else None)
        if self._signal == signal.SIGINT:
            return Result(failure, INTERRUPT_EXIT, self._signal)
        if failure is not None:
            return Result(failure, failure.exit_code, self._signal)
        if self._signal:
            return Result(None, next((end.exit_code for end in ends if end.exit_code), 0), self._signal)
        return Result(None, 0)

    def _close(self) -> None:
        self._selector.close()
        self._board.close()
        for rank in self._ranks:
            rank.close()
