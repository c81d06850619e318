"""Starting ranks: their processes, torch in them, and the group that they form."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import PacelineError
from paceline.notebook.rank_kernels.connection import RankFacts, RankState, no_room
from paceline.notebook.rank_kernels.interrupt import close_store, ports_of_others
from paceline.notebook.rank_kernels.message_pump import MessagePump, StopRequests

STARTUP_S = 300.0  # a slow disk; the user may interrupt earlier
FORM_S = 45.0  # longer than the ranks themselves wait for each other
PORTS_S = 2.0
SHOWN_EVERY_S = 0.1
MODULE = "paceline.notebook.rank"
STARTUP = (RankState.STARTING, RankState.LOADING, RankState.JOINING)


@dataclass(frozen=True)
class StartupProgress:
    """The progress of a startup. `note` is a hint about an unexpected choice, or empty."""

    ranks: tuple[RankFacts, ...]
    seconds: float
    note: str = ""


class RankStartFailed(PacelineError, RuntimeError):
    """A rank could not start. `last_lines` are the last lines that it wrote."""

    def __init__(self, rank: int, reason: str, last_lines: Sequence[str], *, was_there: bool = False) -> None:
        lines = "".join(f"\n  {line}" for line in last_lines)
        what = "died while others started" if was_there else "could not start"
        super().__init__(f"rank {rank} {what}: {reason}{lines}")
        self.rank = rank
        self.reason = reason
        self.last_lines = tuple(last_lines)


class Startup:
    """Starts some ranks; the other ranks of the session stay as they are."""

    def __init__(
        self, pump: MessagePump, ranks: Sequence[int], show: Callable[[StartupProgress], None], note: str
    ) -> None:
        self._pump, self._ranks, self._show, self._note = pump, ranks, show, note
        self._began = time.monotonic()
        self._shown_at = 0.0

    def launch(self, environment: Callable[[int], Mapping[str, str]], folder: Path) -> None:
        """Start the processes, each with the environment of its rank."""
        for rank in self._ranks:
            own = folder / f"ipython{rank}"
            try:
                file = self._pump.kernels[rank].open()
                own.mkdir(exist_ok=True)
            except OSError as error:
                raise no_room(folder, error) from error
            command = [sys.executable, "-m", MODULE, "-f", str(file), f"--ipython-dir={own}"]
            options = (
                "--HistoryManager.enabled=False",
                "--IPKernelApp.capture_fd_output=False",
                f"--IPKernelApp.outstream_class={MODULE}.kernel.RankStream",
                "--Application.log_level=ERROR",
                "--IPCompleter.use_jedi=False",  # it takes seconds to load, and a completion has one second
            )
            self._pump.start_process(rank, [*command, *options], environment(rank))
        self._show_progress()

    def load(self) -> None:
        """Wait until every rank has loaded torch."""
        started = self._pump.send({rank: {} for rank in self._ranks}, channel="shell", kind="kernel_info_request")
        loaded = self._pump.send({rank: {"op": "set_up"} for rank in self._ranks}, channel="shell")
        while len(loaded.replies) < len(self._ranks):
            self._pump.poll(SHOWN_EVERY_S, ("shell",))
            for rank in started.replies:
                self._pump.kernels[rank].stage = RankState.LOADING
            for rank, reply in loaded.replies.items():
                if reply.error:
                    raise RankStartFailed(rank, reply.error, reply.content.get("traceback", ())[-20:])
                self._pump.kernels[rank].reported = reply.content
                self._pump.kernels[rank].stage = RankState.JOINING
            self._check()
            if time.monotonic() - self._shown_at >= SHOWN_EVERY_S:
                self._show_progress()

    def _check(self) -> None:
        # Also a rank that existed before: the group needs all.
        died = next((kernel.died for kernel in self._pump.kernels if kernel.died), None)
        if died is not None:
            raise RankStartFailed(died.rank, f"it {died.how}", died.last_lines, was_there=died.rank not in self._ranks)
        late = [rank for rank in self._ranks if self._pump.kernels[rank].stage is not RankState.JOINING]
        if late and time.monotonic() - self._began > STARTUP_S:
            last_lines = self._pump.kernels[late[0]].last_lines()
            raise RankStartFailed(late[0], f"it did not reply within {STARTUP_S:.0f} s", last_lines)

    def join(self, store: Path, backend: str) -> None:
        """Form the group with the others."""
        self._show_progress()
        for rank, error in form_group(self._pump, store, backend).items():
            raise RankStartFailed(rank, f"it could not join the group: {error}", ())
        for rank in self._ranks:
            # After its first message, that it is idle, nothing that the rank publishes is missed.
            self._pump.kernels[rank].sockets["iopub"].poll(1000)
        self._show_progress()

    def _show_progress(self) -> None:
        self._shown_at = time.monotonic()
        facts = tuple(kernel.facts() for kernel in self._pump.kernels)
        self._show(StartupProgress(facts, self._shown_at - self._began, self._note))


def form_group(pump: MessagePump, store: Path, backend: str, stop: StopRequests | None = None) -> dict[int, str]:
    """Have all ranks leave their group and form the next one. Returns the errors of ranks that could not, by rank."""
    everyone = [kernel.rank for kernel in pump.kernels]
    ports = pump.ask({rank: {"op": "ports"} for rank in everyone}, within_s=PORTS_S)
    content = {"op": "form_group", "store": str(store), "backend": backend}
    replies = pump.ask(
        {rank: {**content, "peer_ports": ports_of_others(ports, rank)} for rank in everyone},
        channel="shell",
        within_s=FORM_S,
        stop=stop,
        on_failure=lambda: close_store(store),  # otherwise they would wait for each other
    )
    errors: dict[int, str] = {}
    for rank in everyone:
        died = pump.kernels[rank].died
        if rank in replies and not replies[rank].error:
            pump.kernels[rank].stage = RankState.IDLE
        elif died is not None:
            errors[rank] = f"it {died.how}"
        else:
            errors[rank] = replies[rank].error if rank in replies else "it does not reply"
    return errors
