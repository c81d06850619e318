"""The peak of this process's memory since a starting point."""

from pathlib import Path

STATUS = Path("/proc/self/status")
ROLLUP = Path("/proc/self/smaps_rollup")
CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """Bytes of host memory that were added since the start, at their highest."""

    def __init__(self) -> None:
        # The kernel's mark would otherwise remember what imports needed for a moment.
        _reset_mark()
        self._before = _kib(STATUS, "VmRSS")

    def peak(self) -> int:
        """Pages of shared memory count by this process's part of them: every rank maps them, and they exist once."""
        mapped_twice = _kib(STATUS, "RssShmem") - _kib(ROLLUP, "Pss_Shmem")
        return (_kib(STATUS, "VmHWM") - self._before - mapped_twice) * 1024

    def forget_peak(self) -> None:
        """Look for the highest point from here on; the start stays where it was."""
        _reset_mark()


def _reset_mark() -> None:
    CLEAR.write_text("5")


def _kib(file: Path, key: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    return 0
