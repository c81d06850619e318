"""Cells are rewritten before they run, so that each part of them runs where it belongs."""

import re
from collections.abc import Callable

from paceline.errors import UsageError
from paceline.notebook.cell_parts import CellPart, Where, pad_above, split
from paceline.notebook.session import NotebookSession

# After these lines of a cell there are ranks, whether or not there were any before.
_SWITCHES_ON = re.compile(r"run_line_magic (?:dist_init|dist_reset|dist_mode (?:on|-e|--enable))\b")
_LEAVES = ("exit", "quit", "exit()", "quit()")


class Router:
    """An input transformer of IPython: takes the lines of a cell, and returns the lines to run."""

    # So IPython skips it when it checks whether a cell is complete, which the rewritten cell would not show.
    has_side_effects = True

    def __init__(self, session: NotebookSession, is_silent: Callable[[], bool], *, in_terminal: bool = False) -> None:
        """`is_silent` tells whether the frontend is running code of its own, rather than a cell of the user."""
        self._in_terminal = in_terminal
        self._session = session
        self._is_silent = is_silent
        self._running = 0

    def cell_begins(self, info: object) -> None:
        self._running += 1

    def cell_ends(self, result: object) -> None:
        self._running = max(0, self._running - 1)  # the cell that loaded the extension had begun before

    def __call__(self, lines: list[str]) -> list[str]:
        # Code that a running cell passes to IPython, as `%time` does below `%%local`, runs where that cell runs.
        if self._running or self._is_silent():
            return lines
        cell = "".join(lines)
        if self._in_terminal and cell.strip() in _LEAVES:
            return lines  # they are for IPython itself
        routed = self._session.mode_on
        try:
            parts = split(cell)
        except UsageError as error:
            return _refuse(error) if routed else lines
        if not (routed or any(part.ranks is not None or _SWITCHES_ON.match(part.command) for part in parts)):
            return lines
        out: list[str] = []
        for part in parts:
            routed = routed or bool(_SWITCHES_ON.match(part.command))
            if part.where is Where.RANKS and (routed or part.ranks is not None):
                out.append(_on_ranks(part))
            else:
                text = pad_above(part.text, part.first_line - 1 - sum(text.count("\n") for text in out))
                out.append(text if text.endswith("\n") else text + "\n")
        return "".join(out).splitlines(keepends=True)


def _on_ranks(part: CellPart) -> str:
    ranks = "all" if part.ranks is None else part.ranks
    return f"get_ipython().run_cell_magic('dist_cell', {ranks!r}, {pad_above(part.text, part.first_line - 1)!r})\n"


def _refuse(error: UsageError) -> list[str]:
    return [f"raise __import__('IPython.core.error').core.error.UsageError({str(error)!r})\n"]
