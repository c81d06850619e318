"""The magics of `%load_ext paceline`. Their spelling is nbdistributed's where it has them."""

import json
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from IPython.core.error import UsageError as ShellUsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from paceline.errors import UsageError
from paceline.launch.lines import name_ranks, spans
from paceline.notebook.fleet.boot import BootFailed
from paceline.notebook.options import wish_of
from paceline.notebook.page import status
from paceline.notebook.page.boot_screen import BootScreen
from paceline.notebook.session import Session

_Magic = TypeVar("_Magic", bound=Callable[..., Any])


def _plainly(magic: _Magic) -> _Magic:
    """Wrong use is one line, not a traceback through this file. The cell fails all the same."""

    @wraps(magic)
    def told(*args: Any, **kwargs: Any) -> Any:
        try:
            return magic(*args, **kwargs)
        except (UsageError, BootFailed) as error:
            raise ShellUsageError(str(error)) from None
        except KeyboardInterrupt as stopped:
            name = magic.__name__
            stopped._render_traceback_ = lambda: [f"KeyboardInterrupt: %{name} was stopped"]  # type: ignore[attr-defined]
            raise

    return told  # type: ignore[return-value]


@magics_class
class DistMagics(Magics):
    """N ranks behind every cell."""

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        super().__init__(shell)
        self._session = session
        self.extension: object = None  # who hung this into the shell, and can take it down

    # ---- ranks

    @magic_arguments()
    @argument("-n", "--num-processes", type=int, help="how many ranks (default: one per GPU; 2 without GPUs)")
    @argument("-g", "--gpu-ids", help="the GPUs of ranks 0, 1, …, as in 1,2; cpu for none")
    @argument(
        "--lanes", type=int, help="lanes of every replica that the cells make: the same bits on any number of ranks"
    )
    @argument("--transport", help="how replicas of the cells exchange gradients: auto, shm, torch")
    @argument("--backend", help="of the process group (default: gloo, and NCCL for GPUs)")
    @argument("-a", "--master-addr", help="accepted for nbdistributed's notebooks: ranks are on this machine")
    @line_magic
    @_plainly
    def dist_init(self, line: str) -> None:
        """Start the ranks. From then on every plain cell runs on all of them."""
        given = _parse(self.dist_init, line)
        wish = wish_of(
            size=given.num_processes,
            gpu_ids=given.gpu_ids,
            lanes=given.lanes,
            transport=given.transport,
            backend=given.backend,
            master_addr=given.master_addr,
        )
        with BootScreen() as screen:
            self._session.start(wish, screen.show)

    @line_magic
    @_plainly
    def dist_status(self, line: str) -> None:
        """What every rank is and does: process, device, memory, state, current line."""
        fleet = self._session.fleet
        facts = fleet.ranks()
        alive = [one.rank for one in facts if not one.died]
        answers = fleet.request("facts", {}, ranks=alive, within_s=2.0) if alive else {}
        self._say(status.tree(facts, {rank: answer.content for rank, answer in answers.items()}))

    @line_magic
    @_plainly
    def dist_kill(self, line: str) -> None:
        """Kill ranks, as in %dist_kill 1."""
        ranks = self._named(line, "%dist_kill 1")
        self._session.fleet.kill(ranks)
        self._say(f"killed {name_ranks(ranks)}; %dist_restart {spans(ranks)} brings back what was killed")

    @line_magic
    @_plainly
    def dist_restart(self, line: str) -> None:
        """Start ranks anew, dead or alive, as in %dist_restart 1. The others keep their variables."""
        ranks = self._named(line, "%dist_restart 1")
        with BootScreen() as screen:
            self._session.fleet.restart(ranks, screen.show)

    @line_magic
    @_plainly
    def dist_shutdown(self, line: str) -> None:
        """End all ranks. Cells run in the notebook's kernel again."""
        if not self._session.has_ranks:
            self._say("there are no ranks")
            return
        size = self._session.fleet.size
        self._session.end()
        self._say(f"ended {size} rank{'s' if size > 1 else ''}; cells run in this kernel again")

    @line_magic
    @_plainly
    def dist_reset(self, line: str) -> None:
        """End all ranks and start as many anew, with nothing in them."""
        with BootScreen() as screen:
            self._session.start_over(screen.show)

    # ---- cells

    @magic_arguments()
    @argument("mode", nargs="?", choices=("on", "off"), help="whether plain cells run on the ranks")
    @argument("-e", "--enable", action="store_const", const="on", dest="mode_flag", help="as on")
    @argument("-d", "--disable", action="store_const", const="off", dest="mode_flag", help="as off")
    @line_magic
    @_plainly
    def dist_mode(self, line: str) -> None:
        """Have plain cells run on the ranks (on) or in the notebook's kernel (off)."""
        given = _parse(self.dist_mode, line)
        wanted = given.mode or given.mode_flag
        if wanted == "on":
            _ = self._session.fleet  # there must be some
        if wanted is not None:
            self._session.mode_on = wanted == "on"
        self._say("plain cells run " + ("on all ranks" if self._session.mode_on else "in this kernel"))

    @cell_magic
    @_plainly
    def dist_cell(self, line: str, cell: str) -> None:
        """What plain cells become; `line` says where they run and where they begin. See routing.py."""
        place = json.loads(line)
        self._check_named(place["ranks"])
        self._session.run(cell, place["ranks"], count=self._count(), first_line=place["line"])

    @cell_magic
    @_plainly
    def distributed(self, line: str, cell: str) -> None:
        """Run the cell on all ranks, or on those that are named, also when plain cells stay in the kernel."""
        self._session.run(cell, line.strip() or None, count=self._count(), first_line=2)

    @cell_magic
    @_plainly
    def rank(self, line: str, cell: str) -> None:
        """Run the cell on some ranks: %%rank 0, [0,2], [0-2], 0:2, all, !0."""
        self._session.fleet  # noqa: B018 - before the ranks that are named are looked for, there must be some
        self._check_named(line)
        self._session.run(cell, line, count=self._count(), first_line=2)

    @cell_magic
    @_plainly
    def local(self, line: str, cell: str) -> None:
        """Run the cell in the notebook's kernel."""
        assert self.shell is not None
        if line.strip():
            raise UsageError(f"expected nothing behind %%local, got {line.strip()!r}")
        self.shell.run_cell(cell).raise_error()

    @line_magic
    @_plainly
    def sync(self, line: str) -> None:
        """Wait until all ranks are there: a barrier."""
        # Not `dist`, which a cell may have named something else.
        self._session.run("__import__('torch').distributed.barrier()", None, count=None, first_line=1)
        self._say(f"all {self._session.fleet.size} ranks are there")

    @magic_arguments()
    @argument("mode", nargs="?", choices=("on", "off"), help="whether training cells end with a picture")
    @line_magic
    @_plainly
    def dist_panel(self, line: str) -> None:
        """Show, after a cell that trained, what each rank did (on) or not (off)."""
        given = _parse(self.dist_panel, line)
        if given.mode is not None:
            self._session.panel_on = given.mode == "on"
        self._say("training cells end " + ("with a picture" if self._session.panel_on else "without a picture"))

    # ---- variables

    @magic_arguments()
    @argument("name", help="a variable of the ranks")
    @argument("--ranks", "-r", default="0", help="from which ranks (default: 0); from several comes a dict")
    @argument("--to", help="under which name it arrives here (default: the same)")
    @line_magic
    @_plainly
    def dist_pull(self, line: str) -> object:
        """Bring a variable of a rank into the notebook's kernel, where it is also returned."""
        assert self.shell is not None
        given = _parse(self.dist_pull, line)
        value = self._session.pull(given.name, given.ranks)
        self.shell.user_ns[given.to or given.name] = value
        return value

    @magic_arguments()
    @argument("name", help="a variable of the notebook's kernel")
    @argument("--ranks", "-r", help="to which ranks (default: all)")
    @argument("--to", help="under which name it arrives there (default: the same)")
    @line_magic
    @_plainly
    def dist_push(self, line: str) -> None:
        """Send a variable of the notebook's kernel to ranks."""
        assert self.shell is not None
        given = _parse(self.dist_push, line)
        if given.name not in self.shell.user_ns:
            raise UsageError(f"there is no variable {given.name!r} in the notebook's kernel; set it in a %%local cell")
        ranks = self._session.push(given.to or given.name, self.shell.user_ns[given.name], given.ranks)
        self._say(f"{given.to or given.name} is set on {name_ranks(ranks)}")

    # ----

    def _check_named(self, spec: str | None) -> None:
        if spec is not None and not spec.strip():
            raise UsageError("expected ranks behind %%rank, as in %%rank 0, [0,2], [0-2], 0:2, all or !0, got none")

    def _named(self, line: str, example: str) -> tuple[int, ...]:
        self._session.fleet  # noqa: B018 - without ranks, that is what is wrong
        if not line.strip():
            raise UsageError(f"expected ranks, as in {example}, got none")
        return self._session.choose(line)

    def _count(self) -> int:
        assert self.shell is not None
        # Not execution_count: newer versions of IPython count on before the cell runs, older ones after it.
        history: Any = self.shell.history_manager
        return len(history.input_hist_raw) - 1

    def _say(self, text: str) -> None:
        print(text)  # noqa: T201 - the output of a magic


def _parse(magic: Any, line: str) -> Any:
    return parse_argstring(magic, line.partition("#")[0])
