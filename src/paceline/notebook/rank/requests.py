"""What a rank is asked over the control channel, and answers while its cell runs."""

import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.notebook.rank import group, wires
from paceline.notebook.rank.position import position
from paceline.notebook.values import pack, unpack

Content = Mapping[str, Any]
Reply = tuple[Mapping[str, Any], Sequence[bytes]]


def answer(kernel: Any, content: Content, buffers: Sequence[bytes]) -> Reply:
    """Do what `op` says."""
    op = content.get("op", "")
    if op not in OPS:
        raise UsageError(f"a rank cannot be asked {op!r}: expected one of {', '.join(sorted(OPS))}")
    return OPS[op](kernel, content, buffers)


def _position(kernel: Any, content: Content, buffers: Sequence[bytes]) -> Reply:
    return position(kernel.shell), ()


def _facts(kernel: Any, content: Content, buffers: Sequence[bytes]) -> Reply:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found: dict[str, Any] = {
        "pid": os.getpid(),
        "rss_bytes": pages * resource.getpagesize(),
        "device": kernel.place.device,
        "gpu_id": kernel.place.gpu_id,
        **position(kernel.shell),
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = torch.__version__
        if kernel.place.device != "cpu" and torch.cuda.is_initialized():
            free, whole = torch.cuda.mem_get_info(kernel.place.device)
            found["gpu_allocated_bytes"] = torch.cuda.memory_allocated(kernel.place.device)
            found["gpu_reserved_bytes"] = torch.cuda.memory_reserved(kernel.place.device)
            found["gpu_free_bytes"], found["gpu_bytes"] = free, whole
    return found, ()


def _ports(kernel: Any, content: Content, buffers: Sequence[bytes]) -> Reply:
    return {"ports": wires.ports()}, ()


def _cut(kernel: Any, content: Content, buffers: Sequence[bytes]) -> Reply:
    return {"cut": wires.cut(content["theirs"])}, ()


def _abort(kernel: Any, content: Content, buffers: Sequence[bytes]) -> Reply:
    group.abort()
    return {}, ()


def _pull(kernel: Any, content: Content, buffers: Sequence[bytes]) -> Reply:
    name = content["name"]
    if name not in kernel.shell.user_ns:
        raise NameError(f"name {name!r} is not defined on rank {kernel.place.rank}")
    return pack(kernel.shell.user_ns[name], name)


def _push(kernel: Any, content: Content, buffers: Sequence[bytes]) -> Reply:
    kernel.shell.push({content["name"]: unpack(content, buffers)})
    return {}, ()


def _timeline(kernel: Any, content: Content, buffers: Sequence[bytes]) -> Reply:
    found: Mapping[str, Any] = import_module("paceline.notebook.rank.timeline").collect(content["since_ns"])
    return found, ()


OPS: Mapping[str, Callable[[Any, Content, Sequence[bytes]], Reply]] = {
    "abort": _abort,
    "cut": _cut,
    "facts": _facts,
    "ports": _ports,
    "position": _position,
    "pull": _pull,
    "push": _push,
    "timeline": _timeline,
}
