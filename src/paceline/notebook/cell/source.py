"""The logical lines of a cell: Python and IPython's own syntax, told apart without running either.

Python's tokenizer gives up at IPython's syntax (`!echo it's`), and each version of it in another way, so the little
that matters is read here: strings, comments, brackets and backslashes.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_ESCAPED = re.compile(r"[ \t]*(?=[%!?,;/])")
_HELP = re.compile(r"([ \t]*)(%{0,2}[^\W\d][\w.*\[\]-]*)\?{1,2}[ \t]*\n?")
_PHYSICAL = re.compile(r"(?:[^\n]*\\\n)*[^\n]*(?:\n|\Z)")
_PROMPT = re.compile(r"\s*(?:>>>(?: |$)|In \[\d+\]: )", re.MULTILINE)
# What a statement goes on over, or ends with. A string that nothing ends is as long as Python takes it for.
_PIECE = re.compile(
    r"""
    (?P<string> (?P<triple>\"{3}|'{3}) (?:\\.|(?!(?P=triple)).)* (?:(?P=triple)|\Z)
              | "(?:\\.|[^"\\\n])*(?:"|(?=\n)|\Z)
              | '(?:\\.|[^'\\\n])*(?:'|(?=\n)|\Z) )
    | (?P<comment> \#[^\n]* )
    | (?P<carry> \\\n )
    | (?P<open> [(\[{] )
    | (?P<close> [)\]}] )
    | (?P<assign> (?<![=!<>:+*/%&|^@~-])=(?!=) )
    | (?P<end> \n )
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMAND = re.compile(r"[ \t]*(?=%[^\W\d]|!)")


@dataclass(frozen=True, slots=True)
class Line:
    """One logical line: a line and all that its brackets, strings and backslashes carry it over to."""

    text: str  # as it stands, with its ends of lines
    number: int  # of its first line in the cell, from 1
    start: int  # where it begins in the cell's text
    command: str = ""  # in IPython's syntax: `%time f()`, `!ls`, `?obj`; empty for Python
    target: str = ""  # what stands before the command: `x = ` or the indentation

    @property
    def says_nothing(self) -> bool:
        """Whether it is blank or a comment."""
        return not self.text.strip() or self.text.lstrip().startswith("#")


def plain(cell: str) -> str:
    """The cell's text with `\\n` at the end of each line, and without the prompts of a pasted session."""
    text = cell.replace("\r\n", "\n").replace("\r", "\n")
    if not _PROMPT.match(text):
        return text
    from IPython.core.inputtransformer2 import classic_prompt, ipython_prompt

    body = text.lstrip("\n")
    lines = re.findall(r"[^\n]*\n|[^\n]+", body)
    return text[: len(text) - len(body)] + "".join(ipython_prompt(classic_prompt(lines)))


def indentation(text: str) -> str:
    """What every line of `text` is indented by: IPython takes it away before it runs a cell."""
    margin: str | None = None
    for line in text.split("\n"):
        if not line.strip():
            continue
        own = line[: len(line) - len(line.lstrip(" \t"))]
        if margin is None:
            margin = own
        while not own.startswith(margin):
            margin = margin[:-1]
    return margin or ""


def logical_lines(text: str) -> Iterator[Line]:
    """The lines of `text`, in order and without a gap. `text` is as `plain` gives it."""
    at, number = 0, 1
    while at < len(text):
        line = _line(text, at, number)
        yield line
        at += len(line.text)
        number += line.text.count("\n")


def _line(text: str, at: int, number: int) -> Line:
    escaped = _ESCAPED.match(text, at)
    if escaped:
        return _command(text, at, number, escaped.end())
    if found := _HELP.fullmatch(_physical(text, at)):
        return Line(found[0], number, at, f"?{found[2]}", found[1])
    depth, assigned = 0, False
    for piece in _PIECE.finditer(text, at):
        kind = piece.lastgroup
        if kind == "open":
            depth += 1
        elif kind == "close":
            depth = max(depth - 1, 0)
        elif kind == "assign" and depth == 0 and not assigned:
            assigned = True
            if value := _COMMAND.match(text, piece.end()):
                return _command(text, at, number, value.end())
        elif kind == "end" and depth == 0:
            return Line(text[at : piece.end()], number, at)
    return Line(text[at:], number, at)


def _command(text: str, at: int, number: int, begins: int) -> Line:
    """A line of IPython's syntax, whose command begins at `begins`: only a backslash carries it over."""
    whole = text[at:begins] + _physical(text, begins)
    command = " ".join(part.strip() for part in whole[begins - at :].split("\\\n"))
    return Line(whole, number, at, command, text[at:begins])


def _physical(text: str, at: int) -> str:
    found = _PHYSICAL.match(text, at)
    return found[0] if found else ""
