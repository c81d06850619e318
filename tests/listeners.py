"""What processes listen on, as the kernel's own tables say it, whoever opened the socket."""

import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

LISTENS = "0A"  # the state of a TCP socket
ACCEPTS = 0x10000  # among the flags of a Unix socket


@dataclass(frozen=True)
class Listener:
    """A socket that takes connections, or datagrams from anyone: `kind` is tcp, udp or unix, `address` without the
    port, and `program` what the process was started with."""

    kind: str
    address: str
    port: int
    program: str

    @property
    def is_local(self) -> bool:
        """Whether nothing but this machine can reach it."""
        return self.kind == "unix" or ip_address(self.address).is_loopback


def listeners_of(pids: Iterable[int]) -> set[Listener]:
    """All that these processes listen on. Those that have ended listen on nothing."""
    found: set[Listener] = set()
    for pid in pids:
        with suppress(OSError):  # it has just ended
            found |= _listeners_of(Path("/proc", str(pid)))
    return found


def tree_of(root: int) -> list[int]:
    """A process with all its descendants that have not become another's."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, fresh = [root], {root}
    while fresh := {pid for pid, parent in parents.items() if parent in fresh}:
        found += sorted(fresh)
    return found


def _listeners_of(process: Path) -> set[Listener]:
    inodes = set(_sockets_of(process))
    if not inodes:
        return set()
    program = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return {
        Listener(kind, address, port, program)
        for kind, address, port, inode in _table(process / "net")
        if inode in inodes
    }


def _sockets_of(process: Path) -> Iterator[str]:
    for entry in (process / "fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            target = str(entry.readlink())
            if target.startswith("socket:["):
                yield target[len("socket:[") : -1]


def _table(net: Path) -> Iterator[tuple[str, str, int, str]]:
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in _lines(net / name):
            _, local, _, state, *more = line.split()
            address, _, port = local.rpartition(":")
            # A datagram socket that is bound takes whatever comes, unless it is connected: state 07 is neither.
            if state == (LISTENS if name.startswith("tcp") else "07"):
                yield name.rstrip("6"), _address(address), int(port, 16), more[5]
    for line in _lines(net / "unix"):
        _, _, _, flags, _, _, inode, *path = line.split()
        if int(flags, 16) & ACCEPTS:
            yield "unix", path[0] if path else "", 0, inode


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()[1:] if file.exists() else []


def _address(text: str) -> str:
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)
