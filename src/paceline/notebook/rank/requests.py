"""What a rank is asked over the control channel, and answers while its cell runs."""

import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.notebook.rank import wires
from paceline.notebook.rank.boot import Place
from paceline.notebook.rank.group import Group
from paceline.notebook.rank.position import position
from paceline.notebook.values import pack, unpack

Content = Mapping[str, Any]
Reply = tuple[Content, Sequence[bytes]]


class Requests:
    """One method for each question, which comes as `op`."""

    def __init__(self, shell: Any, place: Place, group: Group) -> None:
        self._shell, self._place, self._group = shell, place, group
        self._ops: Mapping[str, Callable[[Content, Sequence[bytes]], Reply]] = {
            "abort": self._abort,
            "cut": self._cut,
            "facts": self._facts,
            "ports": self._ports,
            "position": self._position,
            "pull": self._pull,
            "push": self._push,
            "timeline": self._timeline,
        }

    def answer(self, content: Content, buffers: Sequence[bytes]) -> Reply:
        """Do what `op` says."""
        op = content.get("op", "")
        if op not in self._ops:
            raise UsageError(f"a rank cannot be asked {op!r}: expected one of {', '.join(self._ops)}")
        return self._ops[op](content, buffers)

    def _position(self, content: Content, buffers: Sequence[bytes]) -> Reply:
        return position(self._shell), ()

    def _facts(self, content: Content, buffers: Sequence[bytes]) -> Reply:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        device = self._place.device
        found: dict[str, Any] = {
            "pid": os.getpid(),
            "rss_bytes": pages * resource.getpagesize(),
            "device": device,
            "gpu_id": self._place.gpu_id,
            **position(self._shell),
        }
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            found["torch"] = torch.__version__
            if device != "cpu" and torch.cuda.is_initialized():
                found["gpu_allocated_bytes"] = torch.cuda.memory_allocated(device)
                found["gpu_reserved_bytes"] = torch.cuda.memory_reserved(device)
                found["gpu_free_bytes"], found["gpu_bytes"] = torch.cuda.mem_get_info(device)
        return found, ()

    def _ports(self, content: Content, buffers: Sequence[bytes]) -> Reply:
        return {"ports": wires.ports()}, ()

    def _cut(self, content: Content, buffers: Sequence[bytes]) -> Reply:
        return {"cut": wires.cut(content["theirs"])}, ()

    def _abort(self, content: Content, buffers: Sequence[bytes]) -> Reply:
        self._group.abort()
        return {}, ()

    def _pull(self, content: Content, buffers: Sequence[bytes]) -> Reply:
        name = content["name"]
        if name not in self._shell.user_ns:
            raise NameError(f"name {name!r} is not defined on rank {self._place.rank}")
        return pack(self._shell.user_ns[name], name)

    def _push(self, content: Content, buffers: Sequence[bytes]) -> Reply:
        self._shell.push({content["name"]: unpack(content, buffers)})
        return {}, ()

    def _timeline(self, content: Content, buffers: Sequence[bytes]) -> Reply:
        from paceline.notebook.rank.timeline import collect  # loads torch

        return collect(content["since_ns"]), ()
