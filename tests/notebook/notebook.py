"""A real kernel of a notebook, one cell after another."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from jupyter_client.manager import KernelManager

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
WAIT_S = 50.0


@dataclass
class Cell:
    """What became of a cell."""

    ok: bool = True
    stdout: str = ""
    stderr: str = ""
    error: str = ""  # the traceback, as text
    shown: list[dict[str, Any]] = field(default_factory=list)  # figures, results, panels
    seconds: float = 0.0
    stopped_s: float = 0.0  # from the stop button to the end

    @property
    def said(self) -> dict[int, list[str]]:
        """Lines by rank, whether they came folded or, on a busy machine, one by one."""
        found: dict[int, list[str]] = {}
        for line in self.stdout.splitlines():
            gutter = re.match(r"\[(\d+)(?:-(\d+))?\] ?(.*)", line)
            assert gutter, line
            for rank in range(int(gutter[1]), int(gutter[2] or gutter[1]) + 1):
                found.setdefault(rank, []).append(gutter[3])
        return found

    @property
    def all(self) -> str:
        shown = "\n".join(str(one.get("text/plain", "")) for one in self.shown)
        return "\n".join((self.stdout, self.stderr, shown, self.error))


class Notebook:
    """`run` a cell, or press stop in it."""

    def __init__(self, folder: Path) -> None:
        """`folder` is for the kernel's sockets: left to itself it would make them where the tests run."""
        self._context = zmq.Context()
        self.kernel = KernelManager(transport="ipc", ip=str(folder / "kernel"), context=self._context)
        self.kernel.start_kernel()
        self.client = self.kernel.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=WAIT_S)

    def run(
        self, code: str, *, stop_at: str = "", silent: bool = False, when: dict[str, Callable[[], None]] | None = None
    ) -> Cell:
        """Run a cell; when it has written `stop_at`, press the stop button. `when` something is written, call that."""
        due = dict(when or {})
        cell, began, stopped = Cell(), time.monotonic(), 0.0
        sent = self.client.execute(code, silent=silent, store_history=not silent)
        while True:
            message = self.client.get_iopub_msg(timeout=WAIT_S)
            if message["parent_header"].get("msg_id") != sent:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                break
            self._note(cell, kind, content)
            for text in [text for text in due if text in cell.all]:
                due.pop(text)()
            if stop_at and stop_at in cell.all:
                stop_at = ""
                time.sleep(0.2)
                stopped = time.monotonic()
                self.kernel.interrupt_kernel()
        while self.client.get_shell_msg(timeout=WAIT_S)["parent_header"].get("msg_id") != sent:
            continue
        cell.seconds = time.monotonic() - began
        cell.stopped_s = time.monotonic() - stopped if stopped else 0.0
        return cell

    def _note(self, cell: Cell, kind: str, content: dict[str, Any]) -> None:
        if kind == "stream":
            text = COLOURS.sub("", content["text"])
            if content["name"] == "stdout":
                cell.stdout += text
            else:
                cell.stderr += text
                cell.ok = cell.ok and not text.startswith("UsageError")
        elif kind == "error":
            cell.ok = False
            cell.error = COLOURS.sub("", "\n".join(content["traceback"]))
        elif kind in ("display_data", "execute_result", "update_display_data"):
            cell.shown.append(content["data"])

    def good(self, code: str) -> Cell:
        """Run a cell that must not fail."""
        cell = self.run(code)
        assert cell.ok, cell.all
        return cell

    def close(self) -> None:
        self.client.stop_channels()
        self.kernel.shutdown_kernel(now=True)
        self._context.destroy(linger=0)


def alive(pids: list[int]) -> list[int]:
    """Those of these processes that still run; a zombie does not."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            found.append(pid)
    return found


def gone_within(pids: list[int], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while alive(pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
