"""The driver's requests to a rank: set itself up, join a group, report its position, exchange values, and so on."""

import linecache
import os
import resource
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ipykernel.compiler import get_tmp_directory

from paceline.errors import UsageError
from paceline.notebook.rank.rank_group import RankProcessGroup
from paceline.notebook.rank.rank_setup import RankIdentity, set_up, warm_up
from paceline.notebook.values import pack, unpack
from paceline.observe.timeline import mean_ms, read_timeline
from paceline.tcp_connections import local_ports, sever_connections
from paceline.trace import Moment

if TYPE_CHECKING:
    from paceline.reducer.reducer import Reducer

TORCH_COLLECTIVES = str(Path("torch", "distributed", "distributed_c10d.py"))
OUR_WAIT = str(Path("paceline", "collectives", "group.py"))
AUTOGRAD = str(Path("torch", "autograd", "graph.py"))
SHOWN_STEPS = 8
FIRST = 1  # reduction

Reply = tuple[Mapping[str, Any], Sequence[bytes]]


class RankRequests:
    """The requests that the driver sends, each with its `op`."""

    def __init__(self, shell: Any, identity: RankIdentity) -> None:
        self._shell, self._identity, self._group = shell, identity, RankProcessGroup(identity)

    def answer(self, content: Mapping[str, Any], buffers: Sequence[bytes]) -> Reply:
        """Do what `op` says."""
        match content.get("op"):
            case "abort":
                self._group.abort()
                return {}, ()
            case "facts":
                return self._facts(), ()
            case "form_group":
                self._group.form(content)
                return {}, ()
            case "ports":
                return {"ports": local_ports()}, ()
            case "position":
                return position(), ()
            case "pull":
                name = content["name"]
                if name not in self._shell.user_ns:
                    raise NameError(f"name {name!r} is not defined on rank {self._identity.rank}")
                return pack(self._shell.user_ns[name], name)
            case "push":
                self._shell.push({content["name"]: unpack(content, buffers)})
                return {}, ()
            case "set_up":
                found = set_up(self._shell, self._identity)
                warm_up(self._shell)
                return found, ()
            case "sever":
                return {"severed": sever_connections(content["peer_ports"])}, ()
            case "timeline":
                return collect(content["since_ns"]), ()
            case op:
                raise UsageError(f"a rank of this version of paceline does not know the request {op!r}")

    def _facts(self) -> dict[str, Any]:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        device = self._identity.device
        found: dict[str, Any] = {
            "pid": os.getpid(),
            "rss_bytes": pages * resource.getpagesize(),
            **position(),
        }
        torch: Any = sys.modules.get("torch")
        if torch is not None and device != "cpu" and torch.cuda.is_initialized():
            found["gpu_allocated_bytes"] = torch.cuda.memory_allocated(device)
            found["gpu_reserved_bytes"] = torch.cuda.memory_reserved(device)
            found["gpu_free_bytes"], found["gpu_bytes"] = torch.cuda.mem_get_info(device)
        return found


# ---- the current position of this rank's cell, seen from another thread


def position() -> dict[str, Any]:
    """The line of the cell, the call in which it waits for other ranks, if it does, and how many collectives it has
    begun."""
    main = threading.main_thread()
    frames = list(_frames(sys._current_frames().get(main.ident or 0)))
    cell = next((frame for frame in frames if frame.f_code.co_filename.startswith(get_tmp_directory())), None)
    return {
        "line": None if cell is None else cell.f_lineno,
        "source": "" if cell is None else linecache.getline(cell.f_code.co_filename, cell.f_lineno).strip(),
        "waits_in": _waits_in(frames, main.native_id),
        "begun": _begun(),
    }


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _begun() -> int | None:
    """Of torch's default group. It distinguishes a stuck rank from one that is at the same line of a loop again."""
    torch: Any = sys.modules.get("torch")
    group = None if torch is None else torch.distributed.group.WORLD
    try:
        return None if group is None else int(group._get_sequence_number_for_group())
    except Exception:  # noqa: BLE001 - a private name of torch, and only a hint: waits are reported without it
        return None


def _waits_in(frames: list[FrameType], thread: int | None) -> str | None:
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


# ---- what the replicas of this rank did in the last cell


def collect(since_ns: int) -> dict[str, Any]:
    """Of every replica of this process that has reduced since then: the spans of its last steps, and means over all.

    A replica's very first step, in which it lays out its buckets, is left out when there are others.

    Times are those of `time.perf_counter_ns`, which on Linux is CLOCK_MONOTONIC: they compare between the processes
    of one machine. On a GPU they are the host's, when kernels were launched and waited for, unless the replica's
    `trace.device_times` is set.
    """
    if "paceline.replica.guard" not in sys.modules:
        return {"replicas": []}
    from paceline.replica.live import live_replicas

    found = [_read(type(module).__name__, reducer, since_ns) for module, reducer in live_replicas()]
    return {"replicas": [replica for replica in found if replica is not None]}


def _read(name: str, reducer: "Reducer", since_ns: int) -> dict[str, Any] | None:
    stamps = reducer.trace.stamps()
    recent = [stamp for stamp in stamps if stamp.ns >= since_ns]
    if not any(stamp.moment is Moment.BACKWARD_END for stamp in recent):
        return None
    spans = read_timeline(recent)
    steps = list(dict.fromkeys(span.step for span in spans))
    is_partial = reducer.trace.forgets and len(recent) == len(stamps)  # the beginning of the first step may be lost
    has_first = any(stamp.moment is Moment.BACKWARD_BEGIN and stamp.backward == FIRST for stamp in recent)
    leaves_out = len(steps) > 1 and (is_partial or has_first)
    if leaves_out:
        del steps[0]
        spans = [span for span in spans if span.step in steps]
    shown = set(steps[-SHOWN_STEPS:])
    return {
        "module": name,
        "device": str(reducer.bucket_set.layout.params[0].device),
        "size": reducer.transport.size,
        "steps": len(steps),
        "after_first": leaves_out and has_first,
        "mean_ms": mean_ms(spans),
        "spans": [[span.kind.value, *span[1:]] for span in spans if span.step in shown],
    }
