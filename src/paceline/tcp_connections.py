"""The TCP connections of this process, and how those to other ranks are severed.

A collective of gloo blocks in C++ until the peer has sent its part; it ignores signals, and torch has no call that ends
it. It does notice a closed connection. So a rank that must not wait any longer shuts down the sockets between ranks,
and the collective raises at once. The sockets stay open, though shut down, until gloo closes them,
so that their numbers are not reused. Nothing in torch is replaced, and it works for all that uses TCP between ranks:
gloo in the default group, in `new_group`, and in the C++ reducer of torch's DistributedDataParallel.
"""

import os
import socket
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path


def local_ports() -> list[int]:
    """The local ports of all TCP sockets of this process."""
    return sorted({connection.getsockname()[1] for connection in _tcp_sockets()})


def ports_of(pids: Iterable[int]) -> set[int]:
    """The local ports of all TCP sockets of other processes on this machine, which are ours."""
    inodes = {inode for pid in pids for inode in _socket_inodes(Path(f"/proc/{pid}/fd"))}
    found: set[int] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        path = Path(table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[9] in inodes:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def sever_connections(peer_ports: Collection[int], peer_addresses: Collection[str] = ()) -> int:
    """Shut down connections to processes on this machine whose port is one of `peer_ports`, and all to the machines at
    `peer_addresses`, whose processes' ports are not known. Returns how many."""
    found = 0
    for connection in _tcp_sockets() if peer_ports or peer_addresses else ():
        try:
            here, there = connection.getsockname(), connection.getpeername()
        except OSError:  # it listens, or is closed
            continue
        if (there[0] == here[0] and there[1] in peer_ports) or there[0].removeprefix("::ffff:") in peer_addresses:
            try:
                connection.shutdown(socket.SHUT_RDWR)
                found += 1
            except OSError:  # closed meanwhile
                continue
    return found


def _socket_inodes(descriptors: Path) -> Iterator[str]:
    try:
        entries = list(descriptors.iterdir())
    except OSError:  # the process has ended
        return
    for entry in entries:
        try:
            target = os.readlink(entry)  # noqa: PTH115 - the target is no path
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:"):
            yield target.removeprefix("socket:[").removesuffix("]")


def _tcp_sockets() -> Iterator[socket.socket]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):  # noqa: PTH115 - the target is no path
                continue
            connection = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed meanwhile
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                yield connection
