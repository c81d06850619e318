"""Cells are rewritten before they run, so that each part of them runs where it belongs."""

import json
import re
from collections.abc import Callable

from IPython.core.inputtransformer2 import leading_indent

from paceline.errors import UsageError
from paceline.notebook.cell.parts import Part, Where, split
from paceline.notebook.session import Session

# After these lines of a cell there are ranks, whether there were some before it or not.
_SWITCHES_ON = re.compile(r"\s*%(dist_init|dist_reset|dist_mode\s+(on|-e|--enable))\b")
_RANK_MAGIC = re.compile(r"((?:\s*(?:#.*)?\n)*\s*%%rank)(?=[\[(!*\d])")
_LEAVES = ("exit", "quit", "exit()", "quit()")


class Router:
    """An input transformer of IPython: lines of a cell in, lines to run out."""

    # So IPython leaves it out when it asks whether a cell is complete: that is not seen from what becomes of it.
    has_side_effects = True

    def __init__(self, session: Session, is_silent: Callable[[], bool], *, in_terminal: bool = False) -> None:
        """`is_silent`: whether it is the frontend that asks for something, and not a person with a cell."""
        self._in_terminal = in_terminal
        self._session = session
        self._is_silent = is_silent
        self._running = 0

    def cell_begins(self, info: object) -> None:
        self._running += 1

    def cell_ends(self, result: object) -> None:
        self._running = max(0, self._running - 1)  # the cell that loaded the extension had begun before

    def __call__(self, lines: list[str]) -> list[str]:
        # What a running cell has IPython transform, as `%time` does below `%%local`, runs where that cell runs.
        if self._running or self._is_silent():
            return lines
        cell = "".join(leading_indent(lines))
        if self._in_terminal and cell.strip() in _LEAVES:
            return lines  # the person means IPython
        try:
            parts = split(cell)
        except UsageError as error:
            return _refuse(error) if self._session.mode_on else lines
        routed = self._session.mode_on
        if not (routed or any(_SWITCHES_ON.match(part.text) for part in parts)):
            mended = _RANK_MAGIC.match(cell)
            return lines if mended is None else [mended[1] + " " + cell[mended.end() :]]
        out: list[str] = []
        for part in parts:
            routed = routed or bool(_SWITCHES_ON.match(part.text))
            if routed and part.where is Where.RANKS:
                out += _on_ranks(part)
                continue
            if not part.text.lstrip().startswith("%%"):
                # Tracebacks count lines from here. Not empty ones, which IPython would take away.
                out += ["#\n"] * (part.first_line - 1 - sum(line.count("\n") for line in out))
            out.append(part.text if part.text.endswith("\n") else part.text + "\n")
        return "".join(out).splitlines(keepends=True)


def _on_ranks(part: Part) -> list[str]:
    place = json.dumps({"ranks": part.ranks, "line": part.first_line})
    text = part.text or "\n"  # IPython refuses a cell magic with nothing below it, and would name ours
    return [f"get_ipython().run_cell_magic('dist_cell', {place!r}, {text!r})\n"]


def _refuse(error: UsageError) -> list[str]:
    return [f"raise __import__('IPython.core.error').core.error.UsageError({str(error)!r})\n"]
