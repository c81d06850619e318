"""How much memory is left: for the machine, and for every control group that this process is in, of either kind."""

from pathlib import Path

import pytest

from paceline.collectives.shm import memfd
from paceline.collectives.shm.room import shortage
from paceline.errors import SharedMemoryFull

GIB = 1 << 30


def write(root: Path, files: dict[str, object]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


def machine(root: Path, group: str, *, available: int = 64 * GIB, swap: int = 0) -> tuple[Path, Path]:
    """Folders like /proc and /sys/fs/cgroup."""
    meminfo = f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\nSwapFree: {swap // 1024} kB\nHugePages_Total: 0"
    write(root / "proc", {"meminfo": meminfo, "self/cgroup": group})
    (root / "groups").mkdir()
    return root / "proc", root / "groups"


def test_a_machine_that_tells_nothing_refuses_nothing(tmp_path: Path) -> None:
    assert shortage(1 << 60, tmp_path / "proc", tmp_path / "groups") == ""


def test_the_machine_has_what_is_available_and_swap(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/", available=2 * GIB, swap=GIB)
    assert shortage(3 * GIB, proc, groups) == ""
    assert shortage(3 * GIB + 1, proc, groups) == f"this machine has {3 * GIB:,} bytes available"


SECOND = {
    "a/b/memory.max": 8 * GIB,
    "a/b/memory.current": 7 * GIB,
    "a/b/memory.stat": f"anon 1\nfile {3 * GIB}\nshmem {2 * GIB}\ninactive_file {GIB // 2}\nactive_file {GIB // 2}",
}
FIRST = {
    "memory/a/b/memory.limit_in_bytes": 8 * GIB,
    "memory/a/b/memory.usage_in_bytes": 7 * GIB,
    "memory/a/b/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB // 2}\ntotal_active_file {GIB // 2}",
    "memory/memory.limit_in_bytes": 9223372036854771712,
    "memory/memory.usage_in_bytes": 10 * GIB,
}


@pytest.mark.parametrize(
    ("group", "files"),
    [("0::/a/b", SECOND), ("7:pids:/\n4:cpu,memory:/a/b\n0::/", FIRST)],
    ids=["second kind", "first kind"],
)
def test_a_control_group_has_what_its_limit_leaves_and_pages_of_files(
    group: str, files: dict[str, object], tmp_path: Path
) -> None:
    proc, groups = machine(tmp_path, group)
    write(groups, files)
    assert shortage(2 * GIB, proc, groups) == ""
    said = shortage(2 * GIB + 1, proc, groups)
    assert said.endswith(f"is limited to {8 * GIB:,} bytes, of which {2 * GIB:,} are left")


def test_the_limit_of_a_group_above_holds_too(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/a/b")
    write(groups, {"a/b/memory.max": "max", "a/b/memory.current": 5})
    assert shortage(50 * GIB, proc, groups) == ""
    write(groups, {"a/memory.max": GIB, "a/memory.current": GIB + 5})
    assert shortage(memfd.WORTH_ASKING, proc, groups).endswith("of which 0 are left")


def test_in_a_container_the_group_is_found_though_its_path_is_that_of_the_host(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "4:memory:/docker/0123456789")
    write(groups, {"memory/memory.limit_in_bytes": GIB, "memory/memory.usage_in_bytes": 1})
    assert shortage(GIB - 1, proc, groups) == ""
    assert shortage(GIB, proc, groups) != ""


def test_swap_that_a_group_may_use_counts(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/a", swap=4 * GIB)
    write(groups, {"a/memory.max": GIB, "a/memory.current": 0})
    assert shortage(5 * GIB, proc, groups) == ""
    write(groups, {"a/memory.swap.max": 2 * GIB, "a/memory.swap.current": GIB})
    assert shortage(2 * GIB, proc, groups) == ""
    assert shortage(2 * GIB + 1, proc, groups) != ""


def test_what_is_short_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "shortage", lambda nbytes: f"{nbytes:,} are too many")
    memfd.create(memfd.PAGE, "a page").close()
    with pytest.raises(SharedMemoryFull, match=r"for a bucket: 1,048,576 are too many; free memory first"):
        memfd.create(memfd.WORTH_ASKING, "a bucket")
