"""Which lines of a cell run where: on the ranks, or in the notebook's kernel."""

import ast
import re
import warnings
from dataclasses import dataclass
from enum import Enum

from IPython.core.inputtransformer2 import (
    TransformerManager,
    classic_prompt,
    ipython_prompt,
    leading_empty_lines,
    leading_indent,
)

from paceline.errors import UsageError

_COMMENTS = re.compile(r"(?:\s*#[^\n]*\n)*\s*")
_QUESTION = re.compile(r"%%\w+\?")  # `%%time?` asks what it is, and does not run it
_OWN_CELL = re.compile(r"%%(?:(rank)(?![^\W\d])|(local|distributed)\b)([^#\n]*)")
# paceline's line magics run in the notebook's kernel, and so does help on them. Ranks share one environment with the
# kernel: commands that change it run once, in the kernel.
_INSTALLS = r"(?:pip|uv|conda|mamba|micromamba)\b"
_OWN_LINE = re.compile(
    rf"run_line_magic (?:(?:dist_\w+|sync)\b|(?:re|un)?load_ext paceline\b|{_INSTALLS}"
    r"|pinfo2? (?:%{0,2}dist_\w+|%{1,2}(?:sync|rank|local|distributed)\b))"
    rf"|(?:system|getoutput) (?:{_INSTALLS}|python3? -m pip\b)"
)
_MISPLACED = re.compile(r"run_line_magic (%(?:rank|local|distributed)\b.*)")


class Where(Enum):
    """Where a part of a cell runs."""

    RANKS = "ranks"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class CellPart:
    """Some lines of a cell that run in one place.

    `ranks` is what follows `%%rank` or `%%distributed`; None where the cell has neither. `command` is set where the
    part is one line of IPython's syntax: "run_line_magic dist_init -n 2".
    """

    where: Where
    text: str
    first_line: int  # in the cell, from 1
    ranks: str | None = None
    command: str = ""


def split(cell: str) -> list[CellPart]:
    """The parts of a cell, in the order in which they run. Empty if there is nothing to run.

    A cell goes to the ranks as a whole, except for paceline's line magics at its top level (`%dist_status`, `x =
    %dist_pull y`) and for what installs packages (`%pip`, `!pip`): each is a part of its own for the notebook's kernel.
    A cell magic applies to all that follows it; only blank lines and comments may precede it. Raises UsageError for a
    paceline cell magic in another place.
    """
    lines = cell.replace("\r\n", "\n").replace("\r", "\n").splitlines(keepends=True)
    own = leading_empty_lines(lines)
    first_line = 1 + len(lines) - len(own)
    text = "".join(ipython_prompt(classic_prompt(leading_indent(own))))
    comments = _COMMENTS.match(text)
    code = text[comments.end() if comments else 0 :]
    if code.startswith("%%") and not _QUESTION.match(code):
        return [_under_cell_magic(code, first_line + text.count("\n") - code.count("\n"))]
    return _statements(text, first_line)


def _under_cell_magic(text: str, line: int) -> CellPart:
    found = _OWN_CELL.match(text)
    if found is None:
        return CellPart(Where.RANKS, text, line)
    body, rest = text.partition("\n")[2], found[3].strip()
    if found[1]:
        return CellPart(Where.RANKS, body, line + 1, rest)
    if found[2] == "distributed":
        return CellPart(Where.RANKS, body, line + 1, rest or "all")
    if rest:
        raise UsageError(f"expected nothing after %%local, got {rest!r}: write the code on the lines below it")
    return CellPart(Where.LOCAL, body, line + 1)


def _statements(text: str, first_line: int) -> list[CellPart]:
    """The parts of a cell that has no cell magic. IPython decides which of its lines are commands."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks show the warnings
            python = TransformerManager().transform_cell(text)
            flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            statements = compile(python, "<cell>", "exec", flags).body
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError):  # the ranks report the error
        return _for_ranks(text, first_line)
    own = [(found, command) for found in statements if _OWN_LINE.match(command := _command(found, first_line))]
    if not own:
        return _for_ranks(text, first_line)
    lines = re.findall(r".*\n", python)
    parts: list[CellPart] = []
    begin = 0
    for found, command in own:
        parts += _for_ranks("".join(lines[begin : found.lineno - 1]), first_line + begin)
        begin = found.end_lineno or found.lineno
        line = "".join(lines[found.lineno - 1 : begin])
        parts.append(CellPart(Where.LOCAL, line, first_line + found.lineno - 1, command=command))
    return [*parts, *_for_ranks("".join(lines[begin:]), first_line + begin)]


def _command(statement: ast.stmt, first_line: int) -> str:
    """The IPython call behind a line of its syntax, with arguments; empty for Python. Refuses misplaced cell magics."""
    match getattr(statement, "value", None):
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name("get_ipython")), attr=method), args=arguments):
            given = [str(argument.value) for argument in arguments if isinstance(argument, ast.Constant)]
            command = " ".join(" ".join([method, *given]).split())
        case _:
            return ""
    if misplaced := _MISPLACED.match(command):
        raise UsageError(
            f"expected %{misplaced[1]} at the beginning of a cell, got it on line "
            f"{first_line + statement.lineno - 1}, below other code: give it its own cell"
        )
    return command


def _for_ranks(text: str, first_line: int) -> list[CellPart]:
    # A comment above `%dist_init` is not code to run: there may be no ranks yet.
    return [] if _COMMENTS.fullmatch(text + "\n") else [CellPart(Where.RANKS, text, first_line)]


def pad_above(code: str, lines_above: int) -> str:
    """The code with comments above it, so that its lines have the numbers that they have in the notebook's cell.

    Not empty lines, which IPython removes. A cell magic must stand first, and counts its lines by itself.
    """
    lines = code.split("\n")
    empty = next((number for number, line in enumerate(lines) if line.strip()), 0)
    first = lines[empty]
    if first.lstrip().startswith("%%"):
        return code
    indent = first[: len(first) - len(first.lstrip())]  # IPython removes the indentation that all lines share
    return f"{indent}#\n" * (lines_above + empty) + "\n".join(lines[empty:])
