"""How the parts are hung into an IPython shell, and taken out again."""

import atexit
from typing import Any

from paceline.notebook.answers import inspect_of, matcher_of
from paceline.notebook.magics import DistMagics
from paceline.notebook.routing import Router
from paceline.notebook.session import Session


class Extension:
    """One `%load_ext paceline` of one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._session = Session()
        self._router = Router(self._session, self._is_silent, in_terminal=getattr(shell, "kernel", None) is None)
        self._matcher = matcher_of(self._session)
        self._inspect: Any = None

    @classmethod
    def load(cls, shell: Any) -> None:
        if cls._of(shell) is None:
            cls(shell)._hang()

    @classmethod
    def unload(cls, shell: Any) -> None:
        if (found := cls._of(shell)) is not None:
            found._take_down()

    @staticmethod
    def _of(shell: Any) -> "Extension | None":
        """The shell's own list of magics says whether we are in it, and who we are."""
        magics = shell.magics_manager.registry.get(DistMagics.__name__)
        found = getattr(magics, "extension", None)
        return found if isinstance(found, Extension) else None

    def _hang(self) -> None:
        shell = self._shell
        magics = DistMagics(shell, self._session)
        magics.extension = self
        shell.register_magics(magics)
        # Before the others, which take empty lines away: where a part begins is counted from the cell's first line.
        shell.input_transformers_cleanup.insert(0, self._router)
        shell.Completer.custom_matchers.append(self._matcher)
        shell.events.register("pre_run_cell", self._router.cell_begins)
        shell.events.register("post_run_cell", self._router.cell_ends)
        kernel = getattr(shell, "kernel", None)
        if kernel is not None:  # IPython offers no other way to answer for names that it does not hold
            self._inspect = kernel.do_inspect
            kernel.do_inspect = inspect_of(self._session, kernel.do_inspect)
        atexit.register(self._session.end)

    def _take_down(self) -> None:
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
        if kernel is None:
            return False
        content = kernel.get_parent("shell").get("content", {})
        return bool(content.get("silent"))
