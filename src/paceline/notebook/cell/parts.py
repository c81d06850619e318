"""Which lines of a cell run where: on the ranks, or in the kernel of the notebook."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from paceline.errors import UsageError
from paceline.notebook.cell.source import Line, indentation, logical_lines, plain

# Magics that are ours run in the notebook's kernel, and so do questions about them.
_OWN_LINE = re.compile(r"%(?:(?:dist_\w+|sync)\b|(?:re|un)?load_ext\s+paceline\b)")
# Ranks share one environment with the kernel: what changes it is done once, and there.
_INSTALLS = re.compile(r"[%!]\s*(?:pip|uv|conda|mamba|micromamba)\b|!\s*python3? -m pip\b")
_OWN_HELP = re.compile(r"(?:\?{1,2}%{0,2}dist_\w+|\?{1,2}%{1,2}(?:sync|rank|local|distributed))\b")
_OWN_CELL = re.compile(r"%%(?:(rank)(?![^\W\d])|(local|distributed|dist_\w+)\b)\s*([^#]*)")


class Where(Enum):
    """Where a part of a cell runs."""

    RANKS = "ranks"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Part:
    """Some lines of a cell that run in one place. `ranks` is what the cell's magic says of them, if it does."""

    where: Where
    text: str
    first_line: int  # in the cell, from 1
    ranks: str | None = None


def split(cell: str) -> list[Part]:
    """The parts of a cell, in the order in which they run. Empty if there is nothing to run.

    A cell goes to the ranks as a whole, but for our line magics at its top level (`%dist_status`, `x = %dist_pull y`)
    and for what installs packages (`%pip`, `!pip`): each is a part of its own for the notebook's kernel. A cell magic
    rules all that follows it; only blank lines, comments and our line magics may stand before it. Raises UsageError for
    a cell magic of ours in another place.
    """
    text = plain(cell)
    margin = indentation(text)
    parts: list[Part] = []
    code: list[Line] = []
    for line in logical_lines(text):
        at_top = line.command and line.text.startswith(margin + line.text.lstrip()[:1])
        # IPython takes no cell magic that is indented; whoever pasted one of ours with a space before it means it.
        if line.command.startswith("%%") and (at_top or _OWN_CELL.match(line.command)):
            if all(before.says_nothing for before in code) and not _is_question(line):
                return [*parts, _under_cell_magic(text, line)]
            if at_top:
                _check_not_ours(line)
        if at_top and _is_ours(line):
            parts += [*_for_ranks(code), Part(Where.LOCAL, line.text, line.number)]
            code = []
        else:
            code.append(line)
    return [*parts, *_for_ranks(code)]


def _for_ranks(lines: Sequence[Line]) -> list[Part]:
    # A comment above `%dist_init` is nothing to run: there may be no ranks yet.
    if all(line.says_nothing for line in lines):
        return []
    return [Part(Where.RANKS, "".join(line.text for line in lines), lines[0].number)]


def _is_ours(line: Line) -> bool:
    own = (_OWN_LINE, _INSTALLS, _OWN_HELP)
    return any(pattern.match(line.command) for pattern in own) or _is_own_question(line)


def _is_question(line: Line) -> bool:
    """`%%time?` asks what it is, and does not run it."""
    return bool(re.match(r"%%\w+\?", line.command))


def _is_own_question(line: Line) -> bool:
    return _is_question(line) and bool(_OWN_CELL.match(line.command))


def _under_cell_magic(text: str, line: Line) -> Part:
    # Here a backslash carries nothing over, so the line is cut again.
    head, _, body = text[line.start :].partition("\n")
    found = _OWN_CELL.match(head.strip())
    if found is None:
        # From the magic on: below a comment IPython would not know it for one.
        return Part(Where.RANKS, text[line.start :], line.number)
    word, rest = found[1] or found[2], found[3].strip()
    if word == "rank":
        return Part(Where.RANKS, body, line.number + 1, rest)
    if word == "distributed":
        return Part(Where.RANKS, body, line.number + 1, rest or None)
    if word != "local":
        return Part(Where.LOCAL, text[line.start :], line.number)  # IPython says that there is no such cell magic
    if rest:
        raise UsageError(f"expected nothing behind %%local, got {rest!r}: write the code on the lines below it")
    return Part(Where.LOCAL, body, line.number + 1)


def _check_not_ours(line: Line) -> None:
    if _OWN_CELL.match(line.command) and not _is_question(line):
        raise UsageError(
            f"expected {line.command} at the begin of a cell, got it on line {line.number}, below other code: "
            f"give it a cell of its own"
        )
