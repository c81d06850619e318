"""The rank's ends of its pipes, held on this machine on behalf of a remote rank."""

import os
import select
from collections.abc import Callable, Mapping

SLICE_MS = 100


class PipeEnds:
    """Copies of the descriptors with which a rank would have been started."""

    def __init__(self, descriptors: Mapping[str, int]) -> None:
        self._held = {name: os.dup(descriptor) for name, descriptor in descriptors.items()}

    def descriptor(self, name: str) -> int:
        """The number of one of them; -1 when it is not there."""
        return self._held.get(name, -1)

    def write(self, name: str, data: bytes, abandoned: Callable[[], bool]) -> None:
        """Write the rank's output. Waits for the launcher to read, until that is `abandoned`."""
        if name not in self._held:
            return
        room = select.poll()
        room.register(self._held[name], select.POLLOUT)
        while data and not abandoned():
            if room.poll(SLICE_MS):
                try:
                    # A pipe that has room takes this much without blocking.
                    data = data[os.write(self._held[name], data[: select.PIPE_BUF]) :]
                except BrokenPipeError:  # the launcher has closed its end
                    return

    def read(self, name: str) -> bytes:
        """What the launcher has written to the rank; closed at the end of the pipe."""
        data = os.read(self._held[name], 1 << 16)
        if not data:
            os.close(self._held.pop(name))
        return data

    def close(self) -> None:
        """Close them all. Idempotent."""
        while self._held:
            os.close(self._held.popitem()[1])
