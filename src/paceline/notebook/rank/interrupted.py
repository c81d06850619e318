"""The traceback of an interrupt: short, and made at once.

IPython reads and parses the source of every file on the way, which takes longer than all the rest of an interrupt. Of
an interrupt only one thing is of interest: where the cell was.
"""

import linecache
import traceback
from types import TracebackType
from typing import Any

from ipykernel.compiler import get_tmp_directory


def install(shell: Any) -> None:
    """Show KeyboardInterrupt in this way."""
    shell.set_custom_exc((KeyboardInterrupt,), _show)


def _show(
    shell: Any,
    kind: type[BaseException],
    value: BaseException,
    trace: TracebackType | None,
    tb_offset: int | None = None,  # noqa: ARG001 - IPython passes it
) -> list[str]:
    lines = [
        f"{kind.__name__:42}Traceback (most recent call last)",
        *_frames(shell, trace),
        f"{kind.__name__}: {value}",
    ]
    shell._showtraceback(kind, value, lines)
    # IPython 9 makes the traceback once more, to keep it in its history, and asks the exception first.
    value._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    return lines


def _frames(shell: Any, trace: TracebackType | None) -> list[str]:
    """Those of cells, and the one in which it was raised."""
    walked = [(frame.f_code, number) for frame, number in traceback.walk_tb(trace)]
    found = []
    for place, (code, number) in enumerate(walked):
        source = linecache.getline(code.co_filename, number).rstrip("\n")
        if code.co_filename.startswith(get_tmp_directory()):
            _, name = shell.compile.format_code_name(code.co_filename) or ("", "In[?]")
            found.append(f"Cell {name}, line {number}\n----> {number} {source}\n")
        elif place == len(walked) - 1:
            found.append(f"File {code.co_filename}:{number}, in {code.co_name}\n---> {number} {source}\n")
    return found
