"""The ranks of a notebook: started, run, interrupted, restarted and ended from the user's kernel."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import zmq

from paceline.errors import IllegalMove, UsageError
from paceline.launch.seat import reserve_port
from paceline.notebook.events import Died, Noticed, View
from paceline.notebook.fleet.boot import Boot, BootView, form
from paceline.notebook.fleet.folder import private_folder
from paceline.notebook.fleet.interrupt import close_store
from paceline.notebook.fleet.keeping import Keeping
from paceline.notebook.fleet.kernel import Answer, Kernel, RankFacts, RankState
from paceline.notebook.fleet.placing import Wish, environment_of, seat
from paceline.notebook.fleet.running import Group, Outcome, Running, with_line_numbers
from paceline.notebook.fleet.stop import Stop
from paceline.notebook.fleet.switchboard import Switchboard

SETTLE_S = 1.0  # for a cell that nobody listened to
LEAVE_S = 1.0  # how long ranks have to go by themselves
KILL_S = 5.0

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


def _by_one_thread(method: Callable[_Given, _Found]) -> Callable[_Given, _Found]:
    """Of two threads, as of a kernel with subshells, each would take the other's answers off the channels."""

    @wraps(method)
    def alone(*args: _Given.args, **kwargs: _Given.kwargs) -> _Found:
        lock = args[0]._lock  # type: ignore[attr-defined]
        if not lock.acquire(blocking=False):
            raise UsageError("another cell runs on the ranks: wait for its end, or stop it")
        try:
            return method(*args, **kwargs)
        finally:
            lock.release()

    return alone


class Fleet:
    """N ranks, each a kernel of its own, driven by the thread that calls. Between calls nobody listens to them."""

    def __init__(self, wish: Wish) -> None:
        """Starts nothing. Raises UsageError for what this machine cannot give."""
        self.seating = seat(wish)
        self.size = wish.size
        self.generation = 0
        self._wish = wish
        self._lock = threading.RLock()
        self._undo = contextlib.ExitStack()
        self._board: Switchboard | None = None
        self._folder = Path()
        self._master_port = 0

    # Starting and ending -------------------------------------------------------------------------------------------

    def start(self, show: Callable[[BootView], None]) -> None:
        """Start all ranks, and return when every one of them has answered and the group is formed.

        Raises BootFailed when one cannot; nothing is left of any then.
        """
        if self._board is not None:
            raise IllegalMove("the ranks have been started already")
        try:
            self._open()
            self._boot(range(self.size), show)
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._folder = self._undo.enter_context(private_folder())
        holder = self._undo.enter_context(reserve_port())
        self._master_port = holder.getsockname()[1]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._undo.callback(context.destroy, linger=0)
        keeping = Keeping(self.size)
        self._undo.callback(keeping.close)
        self._board = Switchboard([Kernel(rank, self._folder, context) for rank in range(self.size)], keeping)

    def _boot(self, ranks: Sequence[int], show: Callable[[BootView], None]) -> None:
        boot = Boot(self._there, ranks, self.ranks, show, self.seating.note)
        boot.show(at_once=True)
        environments = {
            rank: environment_of(rank, self._wish, self.seating, self._master_port) for rank in range(self.size)
        }
        boot.launch(environments, self._folder)
        boot.load()
        self.generation += 1
        boot.join(self.generation, self._store, self.seating.backend)

    def close(self) -> None:
        """End all ranks, politely and then not, and all they have started. May be called again."""
        board, self._board = self._board, None
        with Stop():  # whoever stops the start of the ranks may press twice; the end is near
            try:
                if board is not None:
                    _ask_to_leave(board)
            finally:
                if board is not None:
                    for kernel in board.kernels:
                        kernel.close()
                self._undo.close()

    # What is known -------------------------------------------------------------------------------------------------

    @_by_one_thread
    def ranks(self) -> list[RankFacts]:
        """What is known of every rank, without asking it."""
        self._there.turn(0.0, ())
        gpu_ids: Sequence[int | None] = self.seating.gpu_ids or (None,) * self.size
        return [
            RankFacts(
                rank=kernel.rank,
                pid=kernel.pid,
                state=kernel.state,
                device=self.seating.devices[kernel.rank],
                gpu_id=gpu_ids[kernel.rank],
                python=kernel.booted.get("python", ""),
                torch=kernel.booted.get("torch", ""),
                died="" if kernel.died is None else kernel.died.how,
            )
            for kernel in self._there.kernels
        ]

    @property
    def _there(self) -> Switchboard:
        if self._board is None:
            raise IllegalMove("there are no ranks: start them with %dist_init first")
        return self._board

    @property
    def _store(self) -> Path:
        return self._folder / f"generation{self.generation}"

    # Cells ---------------------------------------------------------------------------------------------------------

    @_by_one_thread
    def run(
        self,
        code: str,
        ranks: Sequence[int],
        view: View,
        *,
        count: int | None = None,
        first_line: int = 1,
    ) -> Outcome:
        """Run code on some ranks until it has ended on all of them, showing what they say as it comes.

        `count` is the number of the notebook's cell and `first_line` that of the code's first line in it; tracebacks
        name them. When an asked rank is dead, nothing is run and `deaths` says so. SIGINT meanwhile stops the ranks,
        forms the group anew, and is told as `interrupted`. Closes the view in the end.
        """
        board = self._there
        self._check_ranks(ranks)
        try:
            with Stop() as stop:
                running = Running(board, view, Group(self._store, "nccl" in self.seating.backend), stop)
                board.turn(0.0, ("control",))
                if dead := self._dead_among(ranks, view):
                    return Outcome(deaths=dead)
                self._refuse_busy(ranks)
                outcome = running.run(with_line_numbers(code, first_line), ranks, count)
                if outcome.interrupted:
                    self._form_again(view, stop)
                return outcome
        finally:
            view.close(time.monotonic())

    def _dead_among(self, ranks: Sequence[int], view: View) -> tuple[Died, ...]:
        dead = tuple(died for rank in ranks if (died := self._there.kernels[rank].died) is not None)
        if dead:
            news, self._there.fresh_deaths = self._there.fresh_deaths, []
            for died in (*dead, *(died for died in news if died not in dead)):
                view.take(died, time.monotonic())
        return dead

    def _refuse_busy(self, ranks: Sequence[int]) -> None:
        until = time.monotonic() + SETTLE_S
        while (busy := self._busy_among(ranks)) and time.monotonic() < until:
            self._there.turn(0.05)  # a cell that nobody listened to may have ended meanwhile
        if busy:
            raise IllegalMove(f"ranks {busy} are still busy with an earlier cell: interrupt or restart them first")

    def _busy_among(self, ranks: Sequence[int]) -> list[int]:
        kernels = [self._there.kernels[rank] for rank in ranks]
        for kernel in kernels:
            if kernel.cell is not None and kernel.cell.is_over(time.monotonic()):
                kernel.cell = None
        return [kernel.rank for kernel in kernels if kernel.cell is not None]

    def _form_again(self, view: View, stop: Stop) -> None:
        """After an interrupt nobody knows which collectives were begun; a new group has begun none."""
        board = self._there
        dead = [kernel for kernel in board.kernels if kernel.died is not None]
        if dead:
            return  # restarting them forms it
        self.generation += 1
        errors = form(board, self.generation, self._store, self.seating.backend, stop)
        if errors:
            told = "; ".join(f"rank {rank}: {error}" for rank, error in errors.items())
            text = f"the group could not be formed anew ({told}); %dist_restart all starts over"
            view.take(Noticed(text), time.monotonic())

    # Questions -----------------------------------------------------------------------------------------------------

    @_by_one_thread
    def request(
        self,
        op: str,
        content: Mapping[str, Any],
        *,
        ranks: Sequence[int],
        buffers: Sequence[bytes] = (),
        within_s: float = 5.0,
    ) -> dict[int, Answer]:
        """Ask ranks something that they answer also while a cell runs. Who is dead or silent is left out."""
        self._check_ranks(ranks)
        asked = {rank: {**content, "op": op} for rank in ranks}
        return self._there.ask(asked, buffers=buffers, within_s=within_s)

    @_by_one_thread
    def ask(self, rank: int, msg_type: str, content: Mapping[str, Any], within_s: float) -> dict[str, Any] | None:
        """A question of a frontend ("complete_request", "inspect_request") to an idle rank; None for no answer."""
        self._check_ranks([rank])
        self._there.turn(0.0, ("control",))
        if self._there.kernels[rank].state is not RankState.IDLE:
            return None
        found = self._there.ask({rank: content}, channel="shell", kind=msg_type, within_s=within_s)
        return dict(found[rank].content) if rank in found else None

    # Single ranks --------------------------------------------------------------------------------------------------

    @_by_one_thread
    def kill(self, ranks: Sequence[int]) -> None:
        """SIGKILL, and wait for the end."""
        self._check_ranks(ranks)
        self._kill(ranks)
        self._forget_deaths(ranks)  # whoever killed them need not be told

    def _forget_deaths(self, ranks: Sequence[int]) -> None:
        self._there.fresh_deaths = [died for died in self._there.fresh_deaths if died.rank not in ranks]

    def _kill(self, ranks: Sequence[int]) -> None:
        board = self._there
        until = time.monotonic() + KILL_S
        for rank in ranks:
            board.keeping.kill(rank)
        while (left := [rank for rank in ranks if board.kernels[rank].died is None]) and time.monotonic() < until:
            board.turn(0.1, ())
        if left:
            pids = ", ".join(f"rank {rank} (pid {board.kernels[rank].pid})" for rank in left)
            raise UsageError(
                f"{pids} did not end within {KILL_S:.0f} s after SIGKILL: the system holds it, as it does while a "
                f"device or a file system does not answer; nothing was started in its place"
            )

    @_by_one_thread
    def restart(self, ranks: Sequence[int], show: Callable[[BootView], None]) -> None:
        """New processes for these ranks, dead or alive; the others keep their variables. Forms the next generation."""
        self._check_ranks(ranks)
        board = self._there
        board.turn(0.0, ())
        others = [kernel for kernel in board.kernels if kernel.rank not in ranks]
        if dead := [kernel.rank for kernel in others if kernel.died is not None]:
            raise UsageError(
                f"ranks {dead} are dead too, and the group needs all: expected them among those to restart"
            )
        self._refuse_busy([kernel.rank for kernel in others])
        self._kill([rank for rank in ranks if board.kernels[rank].died is None])
        self._forget_deaths(ranks)
        try:
            self._boot(ranks, show)
        except BaseException:
            close_store(self._store)  # the others may wait there for the new ones
            self._kill([rank for rank in ranks if board.kernels[rank].state is RankState.BOOTING])
            raise

    def _check_ranks(self, ranks: Sequence[int]) -> None:
        wrong = [rank for rank in ranks if not 0 <= rank < self.size]
        if wrong or not ranks:
            raise UsageError(f"there is no rank {wrong}: expected some of 0 to {self.size - 1}")


def _ask_to_leave(board: Switchboard) -> None:
    """Ranks that run nothing leave by themselves, and their exit handlers run."""
    board.turn(0.0, ("control",))
    asked = [kernel for kernel in board.kernels if kernel.state is RankState.IDLE]
    for kernel in asked:
        kernel.send("control", "shutdown_request", {"restart": False})
    until = time.monotonic() + LEAVE_S
    while any(kernel.died is None for kernel in asked) and time.monotonic() < until:
        board.turn(0.05, ())
