"""The TCP connections of this process to other ranks.

**Why wires are cut.** A collective of gloo blocks in C++ until the peer has sent its part; it hears no signal, and
torch has no call that ends it. It does hear that its connection has ended. So what an interrupt cannot end by a signal
it ends by shutting the sockets between ranks: the collective raises at once, Python runs again, and finds the
KeyboardInterrupt. The sockets stay open, as shut ones, until gloo closes them, so no number is given to anyone else.
Nothing of torch is replaced, and it works for whoever talks over TCP between ranks: gloo of the default group, of
`new_group`, and inside the C++ reducer of torch's DistributedDataParallel.
"""

import os
import socket
from collections.abc import Collection, Iterator
from pathlib import Path


def ports() -> list[int]:
    """The local ports of all TCP sockets of this process."""
    return sorted({wire.getsockname()[1] for wire in _tcp_sockets()})


def cut(theirs: Collection[int]) -> int:
    """Shut the connections to processes on this machine whose port is one of `theirs`; say how many there were."""
    found = 0
    for wire in _tcp_sockets():
        try:
            here, there = wire.getsockname(), wire.getpeername()
        except OSError:  # it listens, or has ended
            continue
        if there[0] == here[0] and there[1] in theirs:
            try:
                wire.shutdown(socket.SHUT_RDWR)
                found += 1
            except OSError:  # it has ended meanwhile
                continue
    return found


def _tcp_sockets() -> Iterator[socket.socket]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):  # noqa: PTH115 - the target is no path
                continue
            wire = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed meanwhile
            continue
        with wire:
            if wire.family in (socket.AF_INET, socket.AF_INET6) and wire.type == socket.SOCK_STREAM:
                yield wire
