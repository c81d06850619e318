"""The ranks of a notebook: started, run, interrupted, restarted and ended from the user's kernel."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from paceline.errors import IllegalMove, UsageError
from paceline.launch.lines import name_ranks, spans
from paceline.launch.rank_environment import reserve_port
from paceline.notebook.events import Noticed, View
from paceline.notebook.rank_kernels.cell_run import CellOutcome, CellRun
from paceline.notebook.rank_kernels.connection import (
    KernelConnection,
    RankFacts,
    RankReply,
    RankState,
    new_context,
    private_folder,
)
from paceline.notebook.rank_kernels.interrupt import close_store
from paceline.notebook.rank_kernels.message_pump import MessagePump, StopRequests
from paceline.notebook.rank_kernels.start_options import StartOptions, environment_of, place_ranks
from paceline.notebook.rank_kernels.startup import STARTUP, Startup, StartupProgress, form_group

SETTLE_S = 1.0  # for a cell whose output was not read
LEAVE_S = 1.0  # how long ranks have to exit by themselves
KILL_S = 5.0

_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


def _by_one_thread(method: Callable[_Given, _Found]) -> Callable[_Given, _Found]:
    """Let one thread in at a time: with two, as in a kernel with subshells, each would take the other's replies."""

    @wraps(method)
    def alone(*args: _Given.args, **kwargs: _Given.kwargs) -> _Found:
        lock = args[0]._lock  # type: ignore[attr-defined]
        if not lock.acquire(blocking=False):
            raise UsageError("another cell runs on the ranks: wait for it to end, or stop it")
        try:
            return method(*args, **kwargs)
        finally:
            lock.release()

    return alone


class RankKernels:
    """N ranks, each a kernel of its own. The calling thread drives them; between calls their messages are not read."""

    def __init__(self, options: StartOptions, show: Callable[[StartupProgress], None]) -> None:
        """Start all ranks, and return when every one of them has replied and the group is formed.

        Raises UsageError for options that this machine cannot satisfy, and RankStartFailed if a rank cannot start; then
        none is left.
        """
        self.devices = chosen = place_ranks(options)
        self.size = options.size
        self.generation = 0
        self._options = options
        self._lock = threading.RLock()
        self._undo = contextlib.ExitStack()
        try:
            self._folder = self._undo.enter_context(private_folder())
            self._master_port = self._undo.enter_context(reserve_port()).getsockname()[1]
            context = new_context()
            self._undo.callback(context.destroy, linger=0)
            places = zip(chosen.devices, chosen.gpu_ids or (None,) * self.size, strict=True)
            self._pump = MessagePump(
                [
                    KernelConnection(rank, self._folder, context, device=device, gpu_id=gpu_id)
                    for rank, (device, gpu_id) in enumerate(places)
                ]
            )
            self._undo.callback(self._pump.close)
            self._undo.callback(_ask_to_exit, self._pump)
            self._start_ranks(range(self.size), show)
        except BaseException:
            self.close()
            raise

    def _start_ranks(self, ranks: Sequence[int], show: Callable[[StartupProgress], None]) -> None:
        startup = Startup(self._pump, ranks, show, self.devices.note)
        environment = partial(environment_of, self._options, self.devices, self._master_port)
        startup.launch(environment, self._folder)
        startup.load()
        self.generation += 1
        startup.join(self._store, self.devices.backend)

    def close(self) -> None:
        """End all ranks and their descendants; idle ranks may exit by themselves. May be called again."""
        with StopRequests():  # a user who stops the startup may press twice; it is about to end
            self._undo.close()

    @_by_one_thread
    def ranks(self) -> list[RankFacts]:
        """What is known of every rank, without asking it."""
        self._pump.poll(0.0, ())
        return [kernel.facts() for kernel in self._pump.kernels]

    @_by_one_thread
    def check_alive(self, ranks: Sequence[int]) -> None:
        """Raise UsageError, which says how to bring them back, if some of these ranks are dead."""
        died = {facts.rank: facts.died for facts in self.ranks() if facts.died}
        if dead := [rank for rank in ranks if rank in died]:
            left = [rank for rank in range(self.size) if rank not in died]
            causes = "; ".join(f"rank {rank} {died[rank]}" for rank in dead)
            other = f", or run the cell on the others with %%rank [{spans(left)}]" if left else ""
            it = "it" if len(dead) == 1 else "them"
            raise UsageError(f"{causes}: bring {it} back with %dist_restart {spans(dead)}{other}")

    @property
    def _store(self) -> Path:
        return self._folder / f"generation{self.generation}"

    # ---- cells

    @_by_one_thread
    def run(self, code: str, ranks: Sequence[int], view: View, *, count: int | None = None) -> CellOutcome:
        """Run code on some ranks until it has ended on all of them, showing their output as it comes.

        `count` is the number of the notebook's cell, which tracebacks name. Raises UsageError if one of the ranks is
        dead; then nothing is run. SIGINT meanwhile stops the ranks, forms the group again, and is reported as
        `interrupted`. Closes the view in the end.
        """
        pump = self._pump
        try:
            with StopRequests() as stop:
                run = CellRun(pump, view, stop, store=self._store, uses_nccl="nccl" in self.devices.backend)
                self.check_alive(ranks)
                self._wait_until_idle(ranks)
                outcome = run.run(code, ranks, count)
                if outcome.interrupted:
                    self._form_again(view, stop)
                return outcome
        finally:
            view.close(time.monotonic())

    def _wait_until_idle(self, ranks: Sequence[int]) -> None:
        until = time.monotonic() + SETTLE_S
        while (busy := self._busy_among(ranks)) and time.monotonic() < until:
            self._pump.poll(0.05)  # a cell whose output was not read may have ended meanwhile
        if busy:
            verb, them = ("is", "it") if len(busy) == 1 else ("are", "them")
            raise IllegalMove(
                f"{name_ranks(busy)} {verb} still busy with an earlier cell: interrupt or restart {them} first"
            )

    def _busy_among(self, ranks: Sequence[int]) -> list[int]:
        kernels = [self._pump.kernels[rank] for rank in ranks]
        for kernel in kernels:
            if kernel.cell is not None and kernel.cell.is_over(time.monotonic()):
                kernel.cell = None
        return [kernel.rank for kernel in kernels if kernel.cell is not None]

    def _form_again(self, view: View, stop: StopRequests) -> None:
        """Form a new group: after an interrupt it is unknown which collectives were entered in the old one."""
        pump = self._pump
        if any(kernel.died is not None for kernel in pump.kernels):
            return  # restarting them forms it
        self.generation += 1
        errors = form_group(pump, self._store, self.devices.backend, stop)
        if errors:
            reasons = "; ".join(f"rank {rank}: {error}" for rank, error in errors.items())
            text = f"the process group could not be formed again ({reasons}); %dist_restart all starts over"
            view.take(Noticed(text), time.monotonic())

    # ---- requests

    @_by_one_thread
    def request(
        self,
        op: str,
        content: Mapping[str, Any],
        *,
        ranks: Sequence[int],
        buffers: Sequence[bytes] = (),
        within_s: float = 5.0,
    ) -> dict[int, RankReply]:
        """Ask ranks something that they answer even while a cell runs. Dead and silent ranks are left out."""
        return self._pump.ask({rank: {**content, "op": op} for rank in ranks}, buffers=buffers, within_s=within_s)

    @_by_one_thread
    def ask(self, rank: int, msg_type: str, content: Mapping[str, Any], within_s: float) -> dict[str, Any] | None:
        """A request of a frontend ("complete_request", "inspect_request") to an idle rank; None if it did not reply."""
        self._pump.poll(0.0, ("control",))
        if self._pump.kernels[rank].state is not RankState.IDLE:
            return None
        found = self._pump.ask({rank: content}, channel="shell", kind=msg_type, within_s=within_s)
        return dict(found[rank].content) if rank in found else None

    # ---- single ranks

    @_by_one_thread
    def kill(self, ranks: Sequence[int]) -> None:
        """Kill ranks by SIGKILL, and wait until they have exited."""
        pump = self._pump
        until = time.monotonic() + KILL_S
        for rank in ranks:
            pump.kill(rank)
        while (left := [rank for rank in ranks if pump.kernels[rank].died is None]) and time.monotonic() < until:
            pump.poll(0.1, ())
        # Their deaths need not be reported to the user who killed them.
        pump.unreported_deaths = [died for died in pump.unreported_deaths if died.rank not in ranks]
        if left:
            pids = ", ".join(f"rank {rank} (pid {pump.kernels[rank].pid})" for rank in left)
            raise UsageError(
                f"{pids} did not exit within {KILL_S:.0f} s after SIGKILL: the operating system blocks it, as it does "
                f"while a device or a file system does not respond; nothing was started in its place"
            )

    @_by_one_thread
    def restart(self, ranks: Sequence[int], show: Callable[[StartupProgress], None]) -> None:
        """Start new processes for these ranks, dead or alive; the others keep their variables. Forms the next
        generation."""
        pump = self._pump
        pump.poll(0.0, ())
        others = [kernel for kernel in pump.kernels if kernel.rank not in ranks]
        if dead := [kernel.rank for kernel in others if kernel.died is not None]:
            verb = "is" if len(dead) == 1 else "are"
            raise UsageError(
                f"{name_ranks(dead)} {verb} dead too, and the group needs every rank: restart them as well"
            )
        self._wait_until_idle([kernel.rank for kernel in others])
        self.kill(ranks)
        try:
            self._start_ranks(ranks, show)
        except BaseException:
            close_store(self._store)  # the others may wait there for the new ones
            self.kill([rank for rank in ranks if pump.kernels[rank].state in STARTUP])
            raise


def _ask_to_exit(pump: MessagePump) -> None:
    """Ask idle ranks to exit by themselves, so that their exit handlers run."""
    pump.poll(0.0, ("control",))
    asked = [kernel for kernel in pump.kernels if kernel.state is RankState.IDLE]
    for kernel in asked:
        kernel.send("control", "shutdown_request", {"restart": False})
    until = time.monotonic() + LEAVE_S
    while any(kernel.died is None for kernel in asked) and time.monotonic() < until:
        pump.poll(0.05, ())
