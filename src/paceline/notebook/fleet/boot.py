"""From nothing to ranks that answer: processes, torch, and the group."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from paceline.errors import PacelineError
from paceline.notebook.fleet.folder import no_room
from paceline.notebook.fleet.interrupt import close_store, ports_of_others
from paceline.notebook.fleet.kernel import Answer, RankFacts
from paceline.notebook.fleet.stop import Stop
from paceline.notebook.fleet.switchboard import Switchboard

BOOT_S = 300.0  # a slow disk; whoever has had enough interrupts
FORM_S = 45.0  # longer than the ranks themselves wait for each other
PORTS_S = 2.0
SHOWN_EVERY_S = 0.1
MODULE = "paceline.notebook.rank"


class Stage(Enum):
    """How far a rank has come. The order is that of the boot."""

    STARTING = "starting Python"
    LOADING = "loading torch"
    JOINING = "joining the group"
    READY = "ready"


@dataclass(frozen=True)
class BootView:
    """One look at a boot: a stage for every rank. `note` is something the user may not expect, or empty."""

    ranks: tuple[RankFacts, ...]
    stages: tuple[Stage, ...]
    seconds: float
    note: str = ""


class BootFailed(PacelineError, RuntimeError):
    """A rank could not start. `words` are its last lines."""

    def __init__(self, rank: int, reason: str, words: Sequence[str], *, was_there: bool = False) -> None:
        lines = "".join(f"\n  {word}" for word in words)
        what = "went while others started" if was_there else "could not start"
        super().__init__(f"rank {rank} {what}: {reason}{lines}")
        self.rank = rank
        self.reason = reason
        self.words = tuple(words)


class Boot:
    """The start of some ranks, the others of a session staying as they are."""

    def __init__(
        self,
        board: Switchboard,
        ranks: Sequence[int],
        facts: Callable[[], Sequence[RankFacts]],
        show: Callable[[BootView], None],
        note: str,
    ) -> None:
        self._board, self._ranks, self._facts, self._show, self._note = board, ranks, facts, show, note
        self._began = time.monotonic()
        self._stages = {
            kernel.rank: Stage.STARTING if kernel.rank in ranks else Stage.READY for kernel in board.kernels
        }
        self._shown_at = 0.0

    def launch(self, environments: Mapping[int, Mapping[str, str]], folder: Path) -> None:
        """Start the processes."""
        for rank in self._ranks:
            own = folder / f"ipython{rank}"
            try:
                file = self._board.kernels[rank].open()
                own.mkdir(exist_ok=True)
            except OSError as error:
                raise no_room(folder, error) from error
            command = [sys.executable, "-m", MODULE, "-f", str(file), f"--ipython-dir={own}"]
            options = (
                "--HistoryManager.enabled=False",
                "--IPKernelApp.capture_fd_output=False",
                f"--IPKernelApp.outstream_class={MODULE}.streams.RankStream",
                "--Application.log_level=ERROR",
                "--IPCompleter.use_jedi=False",  # it loads for seconds, and rank 0 answers within one or not at all
            )
            self._board.keeping.start(rank, [*command, *options], environments[rank])

    def load(self) -> None:
        """Wait until every rank has loaded torch."""
        asked = {rank: self._board.kernels[rank].send("shell", "kernel_info_request", {}) for rank in self._ranks}
        while asked:
            for heard in self._board.turn(SHOWN_EVERY_S, ("shell",)):
                if heard.message["parent_header"].get("msg_id") != asked.get(heard.rank):
                    continue
                if self._stages[heard.rank] is Stage.STARTING:
                    self._stages[heard.rank] = Stage.LOADING
                    asked[heard.rank] = self._board.kernels[heard.rank].send("shell", "paceline_boot", {})
                else:
                    del asked[heard.rank]
                    self._loaded(heard.rank, Answer.of(heard.message))
            self._look(asked)

    def _look(self, asked: Mapping[int, str]) -> None:
        # Also one that was there before: the group needs all.
        died = next((kernel.died for kernel in self._board.kernels if kernel.died), None)
        if died is not None:
            raise BootFailed(died.rank, f"it {died.how}", died.words, was_there=died.rank not in self._ranks)
        seconds = time.monotonic() - self._began
        if asked and seconds > BOOT_S:
            rank = min(asked)
            words = self._board.keeping.last_words(rank)
            raise BootFailed(rank, f"it did not answer within {BOOT_S:.0f} s", words)
        self.show()

    def _loaded(self, rank: int, answer: Answer) -> None:
        if answer.error:
            raise BootFailed(rank, answer.error, answer.content.get("traceback", ())[-20:])
        self._board.kernels[rank].booted = answer.content
        self._stages[rank] = Stage.JOINING

    def join(self, generation: int, store: Path, backend: str) -> None:
        """Form the group with the others."""
        self.show(at_once=True)
        for rank, error in form(self._board, generation, store, backend).items():
            raise BootFailed(rank, f"it could not join the group: {error}", ())
        for rank in self._ranks:
            self._stages[rank] = Stage.READY
            # What the rank publishes is heard from now on: the word that it is idle has come.
            self._board.kernels[rank].sockets["iopub"].poll(1000)
        self.show(at_once=True)

    def show(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self._shown_at >= SHOWN_EVERY_S:
            self._shown_at = now
            stages = tuple(self._stages[rank] for rank in sorted(self._stages))
            self._show(BootView(tuple(self._facts()), stages, now - self._began, self._note))


def form(board: Switchboard, generation: int, store: Path, backend: str, stop: Stop | None = None) -> dict[int, str]:
    """Have all ranks leave the group before and form the next. Says who could not, and why."""
    everyone = [kernel.rank for kernel in board.kernels]
    asked = board.ask({rank: {"op": "ports"} for rank in everyone}, within_s=PORTS_S)
    ports = {rank: answer.content.get("ports", []) for rank, answer in asked.items()}
    content = {"generation": generation, "store": str(store), "backend": backend}
    answers = board.ask(
        {rank: {**content, "theirs": ports_of_others(ports, rank)} for rank in everyone},
        channel="shell",
        kind="paceline_form",
        within_s=FORM_S,
        stop=stop,
        give_up=lambda: close_store(store),  # or they wait for each other as long as they can
    )
    errors: dict[int, str] = {}
    for rank in everyone:
        died = board.kernels[rank].died
        if rank in answers and not answers[rank].error:
            board.kernels[rank].generation = generation
        elif died is not None:
            errors[rank] = f"it {died.how}"
        else:
            errors[rank] = answers[rank].error if rank in answers else "it does not answer"
    return errors
