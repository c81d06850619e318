"""Output of a rank outside Python's streams: C libraries, children, and the last lines of a crash."""

import codecs
import ctypes
import fcntl
import os

from paceline.launch.tracebacks import FATAL, thread_stack

CHUNK = 1 << 18
MAX_UNREAD = 1 << 24  # a child that writes without end would take all memory
LAST_BYTES = 16384
LAST_LINES = 20
FALLOC_FL_KEEP_SIZE = 1
FALLOC_FL_PUNCH_HOLE = 2


class RawOutput:
    """Descriptor 1 or 2 of one rank.

    It is memory that the rank appends to and this process reads: not a file that could fill a disk, nor a pipe that
    could fill up and block the rank while it is not read, and it keeps what a process wrote before it was killed. What
    was read is released to the operating system.
    """

    def __init__(self, name: str) -> None:
        self.descriptor = os.memfd_create(name)
        # So that truncating it, as a shell's `> /dev/stderr` does, leaves no hole before the next line.
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, fcntl.fcntl(self.descriptor, fcntl.F_GETFL) | os.O_APPEND)
        self._read_to = 0
        self._start = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self) -> str:
        """The output since the last call, at most `CHUNK` bytes of it."""
        left_out = max(0, self.unread() - MAX_UNREAD)
        self._read_to += left_out
        data = os.pread(self.descriptor, CHUNK, self._read_to)
        if not data:
            return ""
        self._read_to += len(data)
        self._free(self._read_to - LAST_BYTES)
        note = f"\n[paceline left out {left_out >> 20} MiB that came too fast]\n" if left_out else ""
        return note + self._decoder.decode(data)

    def unread(self) -> int:
        """The number of new bytes since the last call of `read`."""
        return max(0, self._size() - self._read_to)

    def _size(self) -> int:
        size = os.fstat(self.descriptor).st_size
        if size < max(self._read_to, self._start):  # it was truncated
            self._read_to = self._start = 0
        return size

    def last_lines(self) -> tuple[str, ...]:
        """The end of what came since `mark_start`, read or not; `read` does not return it again.

        Of a crash, for which Python lists all frames of all threads, what it was and where.
        """
        size = self._size()
        start = max(self._start, size - LAST_BYTES)
        text = os.pread(self.descriptor, size - start, start).decode(errors="replace").lstrip("\0")
        self._read_to = size
        lines = text.splitlines()
        crash = next((number for number, line in enumerate(lines) if line.startswith(FATAL)), None)
        if crash is None:
            return tuple(lines[-LAST_LINES:])
        return (*lines[max(0, crash - LAST_LINES) : crash + 1], *thread_stack(lines[crash:]))

    def mark_start(self) -> None:
        """A new process or a new cell starts: earlier output does not count as last lines."""
        self._start = self._size()

    def _free(self, end: int) -> None:
        end -= end % os.sysconf("SC_PAGE_SIZE")
        if end > 0:
            flags = FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
            ctypes.CDLL(None).fallocate(self.descriptor, flags, ctypes.c_long(0), ctypes.c_long(end))

    def close(self) -> None:
        os.close(self.descriptor)
