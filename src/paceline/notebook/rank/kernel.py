"""The kernel of a rank: IPython's, with three more messages."""

import ctypes
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from traitlets import Type

from paceline.notebook.rank import boot, interrupted
from paceline.notebook.rank.group import Group, outlive
from paceline.notebook.rank.progress import draw_bars_as_text
from paceline.notebook.rank.requests import Requests

Reply = tuple[Mapping[str, Any], Sequence[bytes]]


class RankKernel(IPythonKernel):
    """`paceline_boot` and `paceline_form` come over the shell channel: they run where cells run, and never beside one.

    `paceline_request` comes over the control channel, which has a thread of its own: it is answered while a cell runs,
    also while that cell is blocked in C++.
    """

    shell: Any
    session: Any

    msg_types = [*IPythonKernel.msg_types, "paceline_boot", "paceline_form"]  # noqa: RUF012 - as the base has it
    control_msg_types = [*IPythonKernel.control_msg_types, "paceline_request"]  # noqa: RUF012

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.place = boot.Place.from_environment()
        self._group = Group(self.place)
        self._requests = Requests(self.shell, self.place, self._group)
        interrupted.install(self.shell)
        self.shell.ask_exit = _stay
        warnings.filterwarnings(
            "ignore", message="To exit: use", category=UserWarning
        )  # what IPython says of SystemExit
        # Some look there for whether they can draw widgets, which reach no page from here.
        self.shell.config.pop("IPKernelApp", None)
        draw_bars_as_text()
        # debugpy's does nothing until a frontend attaches, and none can attach to a rank: ask as `%debug` does.
        sys.breakpointhook = sys.__breakpointhook__
        # C libraries hold back what they print, since nobody told them that someone looks on.
        libc = ctypes.CDLL(None)
        self.shell.events.register("post_execute", lambda: libc.fflush(None))

    async def execute_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Run a cell under the number that it has in the notebook."""
        count = parent.get("metadata", {}).get("paceline", {}).get("count")
        if count is not None:
            self.shell.execution_count = count
        await super().execute_request(stream, ident, parent)  # type: ignore[no-untyped-call]

    async def interrupt_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """SIGINT to this process and what it started. A cell that awaits is told by a callback; its loop must wake."""
        await super().interrupt_request(stream, ident, parent)  # type: ignore[no-untyped-call]
        self.io_loop.add_callback(lambda: None)

    async def paceline_boot(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        self._answer(stream, ident, parent, lambda *_: (boot.boot(self.shell, self.place), ()))
        boot.warm(self.shell)

    async def paceline_form(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        self._answer(stream, ident, parent, lambda content, _: (self._group.form(content), ()))
        outlive()  # who asked need not wait for it, and the next cell comes after it

    async def paceline_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        self._answer(stream, ident, parent, self._requests.answer)

    def _answer(
        self,
        stream: Any,
        ident: Any,
        parent: dict[str, Any],
        work: Callable[[Mapping[str, Any], Sequence[bytes]], Reply],
    ) -> None:
        """Reply in any case: whoever asked waits for it."""
        buffers: Sequence[bytes] = ()
        try:
            found, buffers = work(parent["content"], [bytes(buffer) for buffer in parent.get("buffers", ())])
            content = {"status": "ok", **found}
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - it is told to the one who asked
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
    raise SystemExit("the ranks stay; %dist_shutdown ends them")


class RankApp(IPKernelApp):
    """ipykernel's application around `RankKernel`."""

    kernel_class: Any = Type(RankKernel, klass="ipykernel.kernelbase.Kernel").tag(config=True)

    def init_iopub(self, context: "zmq.Context[Any]") -> None:
        """Output is never dropped, however much of it waits: the end of a cell is told on the same channel."""
        context.setsockopt(zmq.SNDHWM, 0)
        super().init_iopub(context)  # type: ignore[no-untyped-call]

    def log_connection_info(self) -> None:
        """Nobody else is to connect; so nothing is said about how to."""
