"""The line of the user's code that made a call, as text that is equal on hosts with different folders.

Why more than one line
----------------------
A collective inside a function of the user's (`def mean(x): return paceline.all_reduce(x)`) is always called from the
same line, so the lines that called that function are compared too, a few steps outwards. If paceline itself makes a
call, one line is enough: what the user called is compared in other ways there.

Why cells of notebooks are different
------------------------------------
A cell may run on some of the ranks only, and another one on the others. So two different cells do not show
whether calls belong together; two lines of one cell do. ipykernel puts the process id into a cell's file name; the
rest of the name is derived from its text.
"""

import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

DEPTH = 4  # of the user's frames

_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_PYTHON = f"{sysconfig.get_path('stdlib')}{os.sep}"
# What starts a script, a thread or a cell. Ranks may be started in different ways.
_STARTS = re.compile(
    r"<frozen runpy>$|.*[/\\](?:runpy|threading)\.py$|.*[/\\](?:multiprocessing|concurrent|asyncio)[/\\]"
    r"|.*[/\\](?:IPython|ipykernel)[/\\]"
)
_CELL = re.compile(r".*[/\\]ipykernel_\w+[/\\](\w+)\.py$|<ipython-input-\d+-(\w+)>$|(<(?:stdin|python-input-\d+)>)$")


class CallFrame(NamedTuple):
    """One line that was being executed."""

    file: str
    line: int
    function: str
    cell: bool = False

    def __str__(self) -> str:
        inside = "" if self.function == "<module>" else f" in {self.function}"
        return f"line {self.line} of a cell{inside}" if self.cell else f"{self.file}:{self.line}{inside}"


def call_site(skip: str = "") -> tuple[CallFrame, ...]:
    """The user's frames that led here, innermost first.

    `skip` is the file of the calling function. If paceline called that function, only that one frame is returned.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == skip:
        frame = frame.f_back
    if frame is not None and skip and _kind(frame.f_code.co_filename) == "paceline":
        return (_frame(frame, False),)
    found: list[CallFrame] = []
    while frame is not None and len(found) < DEPTH:
        kind = _kind(frame.f_code.co_filename)
        if kind == "start":
            break
        if kind in ("user", "cell"):
            found.append(_frame(frame, kind == "cell"))
        frame = frame.f_back
    return tuple(found)


def difference(one: Sequence[CallFrame], other: Sequence[CallFrame]) -> int | None:
    """The first place, from inside, at which two call sites differ."""
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine == theirs:
            continue
        apart = mine.cell and theirs.cell and mine.file != theirs.file and mine.function == theirs.function
        return None if apart else place
    return None


def describe_site(site: Sequence[CallFrame], depth: int = 1) -> str:
    """A call site as text: " at train.py:12 in main". Empty where none is known."""
    shown = site[:depth]
    return " at " + ", called at ".join(map(str, shown)) if shown else ""


@cache
def _kind(file: str) -> str:
    if _CELL.match(file):
        return "cell"
    if file.startswith(_OURS):
        return "paceline"
    if _STARTS.match(file):
        return "start"
    if file.startswith(("<frozen ", _TORCH)) or (file.startswith(_PYTHON) and "-packages" not in file):
        return "library"
    return "user"


def _frame(frame: FrameType, cell: bool) -> CallFrame:
    code = frame.f_code
    return CallFrame(_short(code.co_filename), frame.f_lineno, code.co_name, cell)


@cache
def _short(file: str) -> str:
    found = _CELL.match(file)
    if found:
        return next(group for group in found.groups() if group)
    return "/".join(re.split(r"[/\\]", file)[-2:])
