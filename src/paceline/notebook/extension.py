"""How the parts are added to an IPython shell, and removed again: magics, input transformer, completion, tooltips."""

import atexit
from collections.abc import Callable
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from paceline.errors import UsageError
from paceline.notebook.magics import DistMagics
from paceline.notebook.routing import Router
from paceline.notebook.session import NotebookSession

# After this time the user has continued typing.
COMPLETION_S = 1.0

# Magics of this kernel.
_OWN = ("%dist", "%sync", "%%rank", "%%local", "%%distributed")

Inspect = Callable[..., Any]


def load(shell: Any) -> None:
    """Add the magics to an IPython shell, and let its cells go to the ranks once there are some."""
    if _loaded(shell) is None:
        Extension(shell).register()


def unload(shell: Any) -> None:
    """End the ranks and remove the magics."""
    if (extension := _loaded(shell)) is not None:
        extension.unregister()


def _loaded(shell: Any) -> "Extension | None":
    """The extension that this shell has loaded, by the shell's own list of magics."""
    magics = shell.magics_manager.registry.get(DistMagics.__name__)
    found = getattr(magics, "extension", None)
    return found if isinstance(found, Extension) else None


class Extension:
    """One `%load_ext paceline` of one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._session = NotebookSession()
        self._router = Router(self._session, self._is_silent, in_terminal=getattr(shell, "kernel", None) is None)
        self._matcher = _completion_matcher(self._session)
        self._inspect: Any = None

    def register(self) -> None:
        shell = self._shell
        magics = DistMagics(shell, self._session)
        magics.extension = self
        shell.register_magics(magics)
        # Before the others, which remove empty lines: the start of a part is counted from the cell's first line.
        shell.input_transformers_cleanup.insert(0, self._router)
        shell.Completer.custom_matchers.append(self._matcher)
        shell.events.register("pre_run_cell", self._router.cell_begins)
        shell.events.register("post_run_cell", self._router.cell_ends)
        kernel = getattr(shell, "kernel", None)
        if kernel is not None:  # IPython offers no other way to answer for names that it does not hold
            self._inspect = kernel.do_inspect
            kernel.do_inspect = _inspect_on_rank_0(self._session, kernel.do_inspect)
        atexit.register(self._session.end)

    def unregister(self) -> None:
        shell = self._shell
        self._session.end()
        atexit.unregister(self._session.end)
        shell.input_transformers_cleanup.remove(self._router)
        shell.events.unregister("pre_run_cell", self._router.cell_begins)
        shell.events.unregister("post_run_cell", self._router.cell_ends)
        shell.Completer.custom_matchers.remove(self._matcher)
        if self._inspect is not None:
            shell.kernel.do_inspect = self._inspect
        manager = shell.magics_manager
        for kind, names in DistMagics.magics.items():
            for name in names:
                manager.magics[kind].pop(name, None)
        manager.registry.pop(DistMagics.__name__, None)

    def _is_silent(self) -> bool:
        """Frontends run code of their own, such as VS Code's list of variables, with the request marked as silent."""
        kernel = getattr(self._shell, "kernel", None)
        return kernel is not None and bool(kernel.get_parent("shell").get("content", {}).get("silent"))


def _completion_matcher(session: NotebookSession) -> Callable[[CompletionContext], Any]:
    """A matcher for IPython's completer, with the names that rank 0 knows."""

    @context_matcher()
    def names_of_rank_0(context: CompletionContext) -> Any:
        text = context.full_text
        if text.lstrip().startswith(_OWN) and not context.cursor_line:
            return {"completions": []}
        cursor = sum(len(line) + 1 for line in text.split("\n")[: context.cursor_line]) + context.cursor_position
        reply = _ask(session, "complete_request", {"code": text, "cursor_pos": cursor})
        if reply.get("status") != "ok" or not reply.get("matches"):
            return {"completions": []}
        typed = reply.get("metadata", {}).get("_jupyter_types_experimental", [])
        kinds = {one.get("text"): one.get("type") for one in typed}
        return {
            "completions": [SimpleCompletion(text=match, type=kinds.get(match)) for match in reply["matches"]],
            "matched_fragment": text[reply["cursor_start"] : reply["cursor_end"]],
            "suppress": True,
        }

    matcher: Callable[[CompletionContext], Any] = names_of_rank_0
    return matcher


def _inspect_on_rank_0(session: NotebookSession, here: Inspect) -> Inspect:
    """`do_inspect` of a kernel that asks rank 0 first, and itself (`here`) if rank 0 does not know the name."""

    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        content = {"code": code, "cursor_pos": cursor_pos, "detail_level": detail_level}
        reply = _ask(session, "inspect_request", content)
        return reply if reply.get("found") else here(code, cursor_pos, detail_level, omit_sections)

    return do_inspect


def _ask(session: NotebookSession, kind: str, content: dict[str, Any]) -> dict[str, Any]:
    if not (session.mode_on and session.has_ranks):
        return {}
    try:
        return session.kernels.ask(0, kind, content, within_s=COMPLETION_S) or {}
    except UsageError:  # a cell is running
        return {}
