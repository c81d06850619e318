"""How a rank takes KeyboardInterrupt.

**Its traceback is short, and made at once.** IPython reads and parses the source of every file on the way, which takes
longer than all the rest of an interrupt. Of an interrupt only one thing is of interest: where the cell was.

**None is lost.** Python drops what is raised in a destructor or a callback of a weak reference; an interrupt that falls
there is raised again outside of it.
"""

import linecache
import signal
import sys
import threading
from collections.abc import Iterator
from types import CodeType, TracebackType
from typing import Any

from ipykernel.compiler import get_tmp_directory

AGAIN_S = 0.005  # out of the place where it was dropped


def install(shell: Any) -> None:
    """Show KeyboardInterrupt in this way, and raise it again where it would be dropped."""
    shell.set_custom_exc((KeyboardInterrupt,), _show)
    before = sys.unraisablehook

    def again(dropped: "sys.UnraisableHookArgs") -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            # A real signal: it also ends the sleep that the main thread may be in by then.
            main = threading.main_thread().ident
            threading.Timer(AGAIN_S, signal.pthread_kill, (main, signal.SIGINT)).start()
        else:
            before(dropped)

    sys.unraisablehook = again


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
    walked = list(_walk(trace))
    found = []
    for place, (code, number) in enumerate(walked):
        source = linecache.getline(code.co_filename, number).rstrip("\n")
        if code.co_filename.startswith(get_tmp_directory()):
            _, name = shell.compile.format_code_name(code.co_filename) or ("", "In[?]")
            found.append(f"Cell {name}, line {number}\n----> {number} {source}\n")
        elif place == len(walked) - 1:
            found.append(f"File {code.co_filename}:{number}, in {code.co_name}\n---> {number} {source}\n")
    return found


def _walk(trace: TracebackType | None) -> Iterator[tuple[CodeType, int]]:
    """The code and the line of each frame. The jump back to the head of a loop, where signals are looked for, may have
    no line of its own: then it is that of what ran before."""
    while trace is not None:
        code = trace.tb_frame.f_code
        lines = [line for start, _, line in code.co_lines() if line is not None and start <= trace.tb_lasti]
        number: int | None = trace.tb_lineno  # typeshed does not know that there may be none
        yield code, number or (lines[-1] if lines else code.co_firstlineno)
        trace = trace.tb_next
