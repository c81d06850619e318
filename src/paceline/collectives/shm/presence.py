"""What a rank says of itself before any memory is shared, and what follows from what all have said."""

import json
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.collectives.shm import memory
from paceline.collectives.shm.mesh import eventfd
from paceline.errors import SharedMemoryFull


@dataclass(frozen=True)
class Refusal:
    """Why ranks cannot share memory, in one line."""

    reason: str


@dataclass(frozen=True)
class Presence:
    """One rank. `cannot` says why it can share no memory with anybody; `wish` is what its user asked for."""

    rank: int
    boot: str
    network: str  # namespace; the names of abstract sockets are known within one
    processes: str  # namespace
    user: int
    hostname: str
    token: str
    cannot: str = ""
    wish: str = ""

    @classmethod
    def own(cls, rank: int, wish: str = "") -> "Presence":
        cannot, boot, network, processes = _missing(), "", "", ""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            network = str(Path("/proc/self/ns/net").readlink())
            processes = str(Path("/proc/self/ns/pid").readlink())
        except OSError as error:
            cannot = cannot or f"cannot tell which host it runs on ({error})"
        host = socket.gethostname()
        user = os.getuid() if hasattr(os, "getuid") else -1
        return cls(rank, boot, network, processes, user, host, secrets.token_hex(16), cannot, wish)

    @property
    def host(self) -> tuple[str, str, int]:
        """Equal for ranks that can share memory."""
        return self.boot, self.network, self.user

    @property
    def address(self) -> bytes:
        """An abstract one: there is no file to leave behind."""
        return b"\0paceline-" + self.token.encode()

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> "Presence":
        return cls(**json.loads(text))


def _missing() -> str:
    """What this process lacks to share memory."""
    if sys.platform != "linux":
        return f"runs on {sys.platform}, and shared memory needs Linux"
    for name in ("memfd_create", "eventfd"):
        if not hasattr(os, name):
            return f"has a Python without os.{name}"
    try:
        memory.create(memory.PAGE, "a first try")
        eventfd()
    except (OSError, SharedMemoryFull) as error:
        return f"may not make shared memory ({error})"
    return ""


def hosts(everyone: Sequence[Presence]) -> list[list[int]]:
    """The ranks of each host, in the order of their first ranks."""
    found: dict[tuple[str, str, int], list[int]] = {}
    for one in everyone:
        found.setdefault(one.host, []).append(one.rank)
    return list(found.values())


def share_host(everyone: Sequence[Presence]) -> Refusal | None:
    """Why these ranks cannot share memory; None if they can. All ranks come to the same answer."""
    for one in everyone:
        if one.cannot:
            return Refusal(f"rank {one.rank} {one.cannot}")
    first = everyone[0]
    for one in everyone[1:]:
        if one.boot != first.boot:
            return Refusal(
                f"rank {one.rank} runs on another host ({one.hostname}) than rank {first.rank} ({first.hostname})"
            )
        if one.network != first.network:
            return Refusal(
                f"rank {one.rank} runs in another container than rank {first.rank} (network namespace {one.network}, "
                f"not {first.network})"
            )
        if one.user != first.user:
            return Refusal(f"rank {one.rank} runs as user {one.user}, and rank {first.rank} as user {first.user}")
    return None
