"""How much memory this process may still allocate, according to the kernel."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class _Names:
    """What a kind of control groups calls its files, and the numbers in them."""

    limit: str
    used: str
    cached: tuple[str, ...]  # file pages, which the kernel reclaims when memory is short


_FIRST = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_SECOND = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))


def shortage(nbytes: int, proc: Path = PROC, groups: Path = GROUPS) -> str:
    """Why `nbytes` more would trigger the OOM killer; empty if they would not, or if that is unknown."""
    machine = _numbers(proc / "meminfo")
    swap = machine.get("SwapFree", 0) * 1024
    if "MemAvailable" in machine and nbytes > (free := machine["MemAvailable"] * 1024 + swap):
        return f"this machine has {free:,} bytes available"
    for folder, names in _groups_of_this_process(proc, groups):
        limit, used = _number(folder / names.limit), _number(folder / names.used)
        if limit is None or used is None:  # no limit here
            continue
        pages = _numbers(folder / "memory.stat")
        left = limit - used + sum(pages.get(name, 0) for name in names.cached) + _swap_left(folder, swap)
        if nbytes > left:
            left = max(0, left)
            return f"the control group of this process is limited to {limit:,} bytes, of which {left:,} are left"
    return ""


def _groups_of_this_process(proc: Path, groups: Path) -> Iterator[tuple[Path, _Names]]:
    """The control groups whose limits hold here: its own and all its parents.

    Inside a container the path may be that of the host, of which only the end or nothing can be seen.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            mount, names = groups, _SECOND
        elif "memory" in kinds.split(","):
            mount, names = groups / "memory", _FIRST
        else:
            continue
        below = Path(path.lstrip("/"))
        yield from ((mount / part, names) for part in (below, *below.parents))


def _swap_left(folder: Path, machine: int) -> int:
    limit, used = _number(folder / "memory.swap.max"), _number(folder / "memory.swap.current")
    return machine if limit is None or used is None else max(0, min(machine, limit - used))


def _number(file: Path) -> int | None:
    """None if there is no such file, or the word `max` in it."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _numbers(file: Path) -> dict[str, int]:
    """The numbers of a file with one name and number in a line."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    rows = (line.replace(":", " ").split() for line in lines)
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
