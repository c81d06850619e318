"""The kernel of a rank: IPython's, with one more message, its own streams, and its own way to show an interrupt.

**The traceback of KeyboardInterrupt is short, and made at once.** IPython reads and parses the source of every file on
the way, which takes longer than all the rest of an interrupt. Only one thing matters in it: where the cell was.

**No interrupt is lost.** Python drops exceptions raised in a destructor or in a callback of a weak reference; an
interrupt that occurs there is raised again outside it.
"""

import ctypes
import linecache
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from types import CodeType, TracebackType
from typing import Any

import zmq
from ipykernel.compiler import get_tmp_directory
from ipykernel.iostream import OutStream
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from traitlets import Type

from paceline.notebook.rank.rank_requests import RankRequests
from paceline.notebook.rank.rank_setup import RankIdentity, TextBars

AGAIN_S = 0.005  # until Python has left the place where the interrupt was dropped


class RankKernel(IPythonKernel):
    """ipykernel's kernel, which also answers `paceline_request` (`rank/rank_requests.py`).

    Over the control channel, which has a thread of its own, it is answered while a cell runs, even if that cell is
    blocked in C++; over the shell channel it is answered between cells.
    """

    shell: Any
    session: Any

    msg_types = [*IPythonKernel.msg_types, "paceline_request"]  # noqa: RUF012 - as the base has it
    control_msg_types = [*IPythonKernel.control_msg_types, "paceline_request"]  # noqa: RUF012

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self._requests = RankRequests(self.shell, RankIdentity.from_environment())
        _handle_interrupts(self.shell)
        self.shell.ask_exit = _stay
        warnings.filterwarnings("ignore", message="To exit: use", category=UserWarning)  # IPython's, on SystemExit
        # Libraries check this to see whether they can draw widgets, which reach no frontend from here.
        self.shell.config.pop("IPKernelApp", None)
        sys.meta_path.insert(0, TextBars())
        # debugpy's does nothing until a frontend attaches, and none can attach to a rank: ask as `%debug` does.
        sys.breakpointhook = sys.__breakpointhook__
        # C libraries buffer what they print, since their output is no terminal.
        libc = ctypes.CDLL(None)
        self.shell.events.register("post_execute", lambda: libc.fflush(None))

    async def execute_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Run a cell under the number that it has in the notebook."""
        count = parent.get("metadata", {}).get("paceline", {}).get("count")
        if count is not None:
            self.shell.execution_count = count
        await super().execute_request(stream, ident, parent)  # type: ignore[no-untyped-call]

    async def interrupt_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """SIGINT to this process and its children. A callback cancels a cell that awaits; its loop must wake."""
        await super().interrupt_request(stream, ident, parent)  # type: ignore[no-untyped-call]
        self.io_loop.add_callback(lambda: None)

    async def paceline_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Handle a request of the driver. Always reply, because it waits for that."""
        buffers: Sequence[bytes] = ()
        try:
            given = [bytes(buffer) for buffer in parent.get("buffers", ())]
            found, buffers = self._requests.answer(parent["content"], given)
            content = {"status": "ok", **found}
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - it is reported to the driver
            content = {
                "status": "error",
                "ename": type(error).__name__,
                "evalue": str(error),
                "error": f"{type(error).__name__}: {error}",
                "traceback": traceback.format_exc().splitlines(),
            }
        self.session.send(stream, "paceline_reply", content, parent, ident=ident, buffers=list(buffers))


def _stay() -> None:
    """`exit` and `quit` end the cell, as sys.exit() does. IPython would end the process during a later one."""
    raise SystemExit("the ranks keep running; %dist_shutdown ends them")


class RankApp(IPKernelApp):
    """ipykernel's application around `RankKernel`."""

    kernel_class: Any = Type(RankKernel, klass="ipykernel.kernelbase.Kernel").tag(config=True)

    def init_iopub(self, context: "zmq.Context[Any]") -> None:
        """Output is never dropped, however much of it is queued: the end of a cell is announced on the same channel."""
        context.setsockopt(zmq.SNDHWM, 0)
        super().init_iopub(context)  # type: ignore[no-untyped-call]

    def log_connection_info(self) -> None:
        """No one else should connect, so the connection info is not printed."""


class RankStream(OutStream):
    """Sends text to the notebook. Text written to the descriptor itself is read from outside the rank.

    Stock ipykernel replaces descriptors 1 and 2 by a pipe and reads it in a thread of the same process: the last output
    of a crash would stay in that pipe. So the descriptors are not replaced (`--IPKernelApp.capture_fd_output=False`).
    """

    flush_interval = 0.05

    def fileno(self) -> int:
        """For code that passes the stream to a child process."""
        return 1 if self.name == "stdout" else 2

    def write(self, string: str) -> int:
        """Replace lone surrogates, which are not valid Unicode: a message with one could not be sent."""
        if isinstance(string, str) and not string.isascii():
            string = string.encode(errors="backslashreplace").decode()
        return int(super().write(string) or 0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "watchfd": False})  # type: ignore[no-untyped-call]


def _handle_interrupts(shell: Any) -> None:
    """Show KeyboardInterrupt in a few lines, and raise it again where it would be dropped."""
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
    """The frames of cells, and the one in which the exception was raised."""
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
