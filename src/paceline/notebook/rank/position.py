"""Where the cell of this rank is right now, seen from another thread."""

import linecache
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ipykernel.compiler import get_tmp_directory

TORCH_COLLECTIVES = str(Path("torch", "distributed", "distributed_c10d.py"))
OUR_WAIT = str(Path("paceline", "collectives", "wait.py"))
AUTOGRAD = str(Path("torch", "autograd", "graph.py"))


def position(shell: Any) -> dict[str, Any]:
    """The line of the cell, what it waits in, if it waits for other ranks, and how many collectives it has begun."""
    main = threading.main_thread()
    frames = list(_frames(sys._current_frames().get(main.ident or 0)))
    cell = next((frame for frame in frames if frame.f_code.co_filename.startswith(get_tmp_directory())), None)
    found: dict[str, Any] = {
        "line": None,
        "source": "",
        "waits_in": _wait(frames, main.native_id),
        "cell": None,
        "begun": _begun(),
    }
    if cell is not None:
        found["line"] = cell.f_lineno
        found["source"] = linecache.getline(cell.f_code.co_filename, cell.f_lineno).strip()
        found["cell"] = shell.execution_count
    return found


def _begun() -> int | None:
    """Of torch's default group. It tells a rank that is stuck from one that is in the same line of a loop again."""
    torch: Any = sys.modules.get("torch")
    group = None if torch is None else torch.distributed.group.WORLD
    try:
        return None if group is None else int(group._get_sequence_number_for_group())
    except Exception:  # noqa: BLE001 - a private name of torch, and only a hint: who waits is told without it
        return None


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _wait(frames: list[FrameType], thread: int | None) -> str | None:
    """The outermost of what it waits in is what the user called: `all_gather_object` calls `all_gather`."""
    names: list[str] = []
    for frame in frames:
        code = frame.f_code
        if code.co_filename.endswith(OUR_WAIT) and code.co_name == "finish":
            return str(frame.f_locals.get("what", "a collective"))
        if code.co_filename.endswith(TORCH_COLLECTIVES) and not code.co_name.startswith("_"):
            names.append(code.co_name)
        elif code.co_filename.endswith(AUTOGRAD) and code.co_name == "_engine_run_backward" and _sleeps(thread):
            names.append("backward")
    return names[-1] if names else None


def _sleeps(thread: int | None) -> bool:
    """On a CPU, the thread that calls backward computes it; when it sleeps, it waits for others."""
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.cuda.is_initialized():
        return False
    try:
        text = Path(f"/proc/self/task/{thread}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "S"
