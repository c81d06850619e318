"""The magics of `%load_ext paceline`. Those that nbdistributed also has are spelled in the same way."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from IPython.core.error import UsageError as ShellUsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from paceline.errors import UsageError
from paceline.launch.lines import name_ranks, spans
from paceline.notebook.cell_parts import pad_above
from paceline.notebook.output.status import startup_display, tree
from paceline.notebook.rank_kernels.start_options import start_options
from paceline.notebook.rank_kernels.startup import RankStartFailed
from paceline.notebook.session import NotebookSession

_Magic = TypeVar("_Magic", bound=Callable[..., Any])


def _short_errors(magic: _Magic) -> _Magic:
    """Show a usage error as one line, without a traceback through this file. The cell still fails."""

    @wraps(magic)
    def shortened(*args: Any, **kwargs: Any) -> Any:
        try:
            return magic(*args, **kwargs)
        except (UsageError, RankStartFailed) as error:
            raise ShellUsageError(str(error)) from None
        except KeyboardInterrupt as stopped:
            name = magic.__name__
            stopped._render_traceback_ = lambda: [f"KeyboardInterrupt: %{name} was stopped"]  # type: ignore[attr-defined]
            raise

    return shortened  # type: ignore[return-value]


@magics_class
class DistMagics(Magics):
    """Cells on N ranks."""

    def __init__(self, shell: InteractiveShell, session: NotebookSession) -> None:
        super().__init__(shell)
        self._session = session
        self.extension: object = None  # the extension that registered this, and can unregister it

    # ---- ranks

    @magic_arguments()
    @argument("-n", "--num-processes", type=int, help="number of ranks (default: one per GPU, or 2 without GPUs)")
    @argument("-g", "--gpu-ids", help="the GPUs of ranks 0, 1, and so on, as in 1,2; cpu for none")
    @argument("--lanes", type=int, help="lanes of every replica: the same bits on any number of ranks")
    @argument("--transport", help="how replicas exchange gradients: auto, shm or torch")
    @argument("--backend", help="backend of the process group (default: gloo, and NCCL for GPUs)")
    @argument("-a", "--master-addr", help="accepted for notebooks of nbdistributed; ranks always run on this machine")
    @line_magic
    @_short_errors
    def dist_init(self, line: str) -> None:
        """Start the ranks. From then on every plain cell runs on all of them."""
        given = _parse(self.dist_init, line)
        options = start_options(
            size=given.num_processes,
            gpu_ids=given.gpu_ids,
            lanes=given.lanes,
            transport=given.transport,
            backend=given.backend,
            master_addr=given.master_addr,
        )
        with startup_display() as show:
            self._session.start(options, show)

    @line_magic
    @_short_errors
    def dist_status(self, line: str) -> None:
        """Show process, device, memory, state and current line of every rank."""
        kernels = self._session.kernels
        facts = kernels.ranks()
        alive = [one.rank for one in facts if not one.died]
        answers = kernels.request("facts", {}, ranks=alive, within_s=2.0) if alive else {}
        self._say(tree(facts, {rank: answer.content for rank, answer in answers.items()}))

    @line_magic
    @_short_errors
    def dist_kill(self, line: str) -> None:
        """Kill ranks, as in %dist_kill 1."""
        ranks = self._named(line, "%dist_kill 1")
        self._session.kernels.kill(ranks)
        self._say(f"killed {name_ranks(ranks)}; %dist_restart {spans(ranks)} starts new ones")

    @line_magic
    @_short_errors
    def dist_restart(self, line: str) -> None:
        """Replace ranks, dead or alive, by new processes, as in %dist_restart 1. The others keep their variables."""
        ranks = self._named(line, "%dist_restart 1")
        with startup_display() as show:
            self._session.kernels.restart(ranks, show)

    @line_magic
    @_short_errors
    def dist_shutdown(self, line: str) -> None:
        """End all ranks. Cells run in the notebook's kernel again."""
        if not self._session.has_ranks:
            self._say("there are no ranks")
            return
        size = self._session.kernels.size
        self._session.end()
        self._say(f"ended {size} rank{'s' if size > 1 else ''}; cells run in this kernel again")

    @line_magic
    @_short_errors
    def dist_reset(self, line: str) -> None:
        """End all ranks and start the same number of new ones."""
        with startup_display() as show:
            self._session.start_over(show)

    # ---- cells

    @magic_arguments()
    @argument("mode", nargs="?", choices=("on", "off"), help="whether plain cells run on the ranks")
    @argument("-e", "--enable", action="store_const", const="on", dest="mode_flag", help="same as on")
    @argument("-d", "--disable", action="store_const", const="off", dest="mode_flag", help="same as off")
    @line_magic
    @_short_errors
    def dist_mode(self, line: str) -> None:
        """Run plain cells on the ranks (on) or in the notebook's kernel (off)."""
        given = _parse(self.dist_mode, line)
        wanted = given.mode or given.mode_flag
        if wanted == "on":
            _ = self._session.kernels  # raises if there are none
        if wanted is not None:
            self._session.mode_on = wanted == "on"
        self._say("plain cells run " + ("on all ranks" if self._session.mode_on else "in this kernel"))

    @cell_magic
    @_short_errors
    def dist_cell(self, line: str, cell: str) -> None:
        """The magic to which routing.py rewrites cells for ranks: like `%%rank`, but line numbers are already right."""
        self._run(cell, line)

    @cell_magic
    @_short_errors
    def distributed(self, line: str, cell: str) -> None:
        """Run the cell on all ranks, or on those named, even if plain cells run in the notebook's kernel."""
        self._run(pad_above(cell, 1), line.strip() or "all")

    @cell_magic
    @_short_errors
    def rank(self, line: str, cell: str) -> None:
        """Run the cell on some ranks: %%rank 0, [0,2], [0-2], 0:2, all, !0."""
        self._run(pad_above(cell, 1), line)

    @cell_magic
    @_short_errors
    def local(self, line: str, cell: str) -> None:
        """Run the cell in the notebook's kernel."""
        assert self.shell is not None
        if line.strip():
            raise UsageError(f"expected nothing after %%local, got {line.strip()!r}")
        self.shell.run_cell(cell).raise_error()

    @line_magic
    @_short_errors
    def sync(self, line: str) -> None:
        """Wait until all ranks have arrived: a barrier."""
        # Not `dist`: a cell may have given that name to something else.
        self._session.run("__import__('torch').distributed.barrier()", "all", count=None)
        self._say(f"all {self._session.kernels.size} ranks have arrived")

    @magic_arguments()
    @argument("mode", nargs="?", choices=("on", "off"), help="whether to show the picture")
    @line_magic
    @_short_errors
    def dist_panel(self, line: str) -> None:
        """Turn the picture of what each rank did, below training cells, on or off."""
        given = _parse(self.dist_panel, line)
        if given.mode is not None:
            self._session.panel_on = given.mode == "on"
        self._say("the picture below training cells is " + ("on" if self._session.panel_on else "off"))

    # ---- variables

    @magic_arguments()
    @argument("name", help="a variable of the ranks")
    @argument("--ranks", "-r", default="0", help="ranks to read from (default: 0); several ranks give a dict")
    @argument("--to", help="its name in the notebook's kernel (default: the same)")
    @line_magic
    @_short_errors
    def dist_pull(self, line: str) -> object:
        """Copy a variable of a rank into the notebook's kernel, and return it."""
        assert self.shell is not None
        given = _parse(self.dist_pull, line)
        value = self._session.pull(given.name, given.ranks)
        self.shell.user_ns[given.to or given.name] = value
        return value

    @magic_arguments()
    @argument("name", help="a variable of the notebook's kernel")
    @argument("--ranks", "-r", help="ranks to send to (default: all)")
    @argument("--to", help="its name on the ranks (default: the same)")
    @line_magic
    @_short_errors
    def dist_push(self, line: str) -> None:
        """Send a variable of the notebook's kernel to ranks."""
        assert self.shell is not None
        given = _parse(self.dist_push, line)
        if given.name not in self.shell.user_ns:
            raise UsageError(f"there is no variable {given.name!r} in the notebook's kernel; set it in a %%local cell")
        ranks = self._session.push(given.to or given.name, self.shell.user_ns[given.name], given.ranks)
        self._say(f"{given.to or given.name} is set on {name_ranks(ranks)}")

    # ----

    def _run(self, cell: str, spec: str) -> None:
        if not spec.strip():
            raise UsageError("expected ranks after %%rank, as in %%rank 0, [0,2], [0-2], 0:2, all or !0, got none")
        assert self.shell is not None
        # Not execution_count: newer versions of IPython increment it before the cell runs, older ones after.
        history: Any = self.shell.history_manager
        self._session.run(cell, spec, count=len(history.input_hist_raw) - 1)

    def _named(self, line: str, example: str) -> tuple[int, ...]:
        self._session.kernels  # noqa: B018 - raises if there are none
        if not line.strip():
            raise UsageError(f"expected ranks, as in {example}, got none")
        return self._session.choose(line)

    def _say(self, text: str) -> None:
        print(text)  # noqa: T201 - the output of a magic


def _parse(magic: Any, line: str) -> Any:
    return parse_argstring(magic, line.partition("#")[0])
