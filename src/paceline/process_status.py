"""What the kernel reports about a process, the processor, signals, memory limits and the OOM killer. Needs no torch."""

import contextlib
import os
import platform
import re
import signal
from pathlib import Path
from typing import NamedTuple


class ProcessStatus(NamedTuple):
    """The state letter of a process, empty when it is gone, the CPU time of all its threads, and the bytes that it has
    read and written."""

    state: str
    cpu_s: float
    moved: int = 0

    @property
    def stopped(self) -> bool:
        """Stopped by a signal, not by a debugger (`t`)."""
        return self.state == "T"


def read_status(pid: int) -> ProcessStatus:
    """The state of a process now."""
    try:
        # The command comes second, in brackets, and may itself contain spaces and brackets.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ProcessStatus("", 0.0)
    return ProcessStatus(fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), _moved(pid))


def _moved(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:  # it has ended, or belongs to another user
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "wchar:")))


def stopped_children(pid: int) -> list[int]:
    """The processes that `pid` has started and that were stopped by a signal, such as DataLoader workers."""
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended, or the kernel does not offer this
        return []
    return [child for child in children if read_status(child).stopped]


def cpu_model() -> str:
    """The name of this machine's processor."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()  # ARM's kernel names no model


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 40` for one that has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def oom_kills() -> int:
    """How many processes the OOM killer has killed: in this control group, else on this machine."""
    group = _memory_group()
    for path in (group / "memory.events", group / "memory.oom_control", Path("/proc/vmstat")):
        with contextlib.suppress(OSError):
            for line in path.read_text().splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return 0


def memory_limit() -> int | None:
    """The memory limit of this control group in bytes, if there is one."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int((_memory_group() / name).read_text())
            if limit < 1 << 60:  # the old interface says "no limit" with a huge number
                return limit
    return None


def _memory_group() -> Path:
    """The folder of this process's control group, of either version; the root's when it cannot be seen."""
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            base = root / "memory" if "memory" in controllers.split(",") else root if number == "0" else None
            # Inside a container the path may be that of the host, and the own group is what is mounted at the root.
            if base is not None and any(base.glob("memory.*")):
                own = base / path.lstrip("/")
                return own if own.is_dir() else base
    return root
