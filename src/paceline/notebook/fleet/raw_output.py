"""What a rank's process writes to its descriptors 1 and 2: C libraries, children, and the last words of a crash."""

import codecs
import ctypes
import fcntl
import os

from paceline.launch.tracebacks import FATAL, thread_stack

CHUNK = 1 << 18
MOST = 1 << 24  # unread: a child that writes without end would take all memory
LAST_BYTES = 16384
LAST_LINES = 20
FALLOC_FL_KEEP_SIZE = 1
FALLOC_FL_PUNCH_HOLE = 2


class RawOutput:
    """One stream of one rank, in memory that the rank appends to and this process reads.

    There is no file that could fill a disk, no pipe that could fill up and stop the rank while nobody reads, and what a
    process said before it was killed is there. What was read is given back to the system.
    """

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(name)
        # So that whoever empties it, as a shell's `> /dev/stderr` does, leaves no hole before the next line.
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, fcntl.fcntl(self.descriptor, fcntl.F_GETFL) | os.O_APPEND)
        self._read_to = 0
        self._begun_at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> str:
        """What has come since the last call, at most `CHUNK` bytes of it."""
        left_out = max(0, self.unread() - MOST)
        self._read_to += left_out
        data = os.pread(self.descriptor, CHUNK, self._read_to)
        if not data:
            return ""
        self._read_to += len(data)
        self._give_back(self._read_to - LAST_BYTES)
        note = f"\n[paceline left out {left_out >> 20} MiB that came too fast]\n" if left_out else ""
        return note + self._decoder.decode(data)

    def unread(self) -> int:
        """How many bytes have come since the last call of `read`."""
        return max(0, self._size() - self._read_to)

    def _size(self) -> int:
        size = os.fstat(self.descriptor).st_size
        if size < max(self._read_to, self._begun_at):  # somebody has emptied it
            self._read_to = self._begun_at = 0
        return size

    def last_words(self) -> tuple[str, ...]:
        """The end of what came since `begin_anew`, read or not; `read` says no more of it."""
        size = self._size()
        start = max(self._begun_at, size - LAST_BYTES)
        text = os.pread(self.descriptor, size - start, start).decode(errors="replace").lstrip("\0")
        self._read_to = size
        return _essence(text.splitlines())

    def begin_anew(self) -> None:
        """What comes from now on are the last words: those of a new process, or in a new cell."""
        self._begun_at = self._size()

    def _give_back(self, end: int) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        end -= end % page
        if end > 0:
            libc = ctypes.CDLL(None)
            libc.fallocate(
                self.descriptor, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(end)
            )

    def close(self) -> None:
        os.close(self.descriptor)


def _essence(lines: list[str]) -> tuple[str, ...]:
    """The last lines; of a crash what it was and where, since Python lists all frames of all threads."""
    crash = next((number for number, line in enumerate(lines) if line.startswith(FATAL)), None)
    if crash is None:
        return tuple(lines[-LAST_LINES:])
    return (*lines[max(0, crash - LAST_LINES) : crash + 1], *thread_stack(lines[crash:]))
