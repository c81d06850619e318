"""The process group of a rank: one per generation.

**Why a file and not a port.** The ranks of a notebook meet over a file in the session's private folder. Nobody listens,
so no rank is special: any of them may die and be started again while the others live on. A rank that waits at the file
of an old generation can be freed from outside, by making the file unreadable (`rank_kernels/interrupt.py`).

**Why connections are severed.** A collective of gloo blocks in C++ until the peer has sent its part; it ignores
signals, and torch has no call that ends it. It does notice that its connection has ended. So what an interrupt cannot
end by a signal it ends by shutting down the sockets between ranks: the collective raises at once, Python runs again,
and raises KeyboardInterrupt. The sockets stay open, though shut down, until gloo closes them, so that their numbers are
not reused. Nothing in torch is replaced, and it works for all that uses TCP between ranks: gloo in the default group,
in `new_group`, and in the C++ reducer of torch's DistributedDataParallel.
"""

import os
import socket
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.notebook.rank.rank_setup import RankIdentity

FORM_S = 30.0
ABORT_S = 5.0


class RankProcessGroup:
    """The group that this rank is in, and how it leaves it."""

    def __init__(self, identity: RankIdentity) -> None:
        self._identity = identity
        self._aborting: threading.Thread | None = None

    def form(self, content: Mapping[str, Any]) -> None:
        """Leave the previous generation, if there was one, and join the next with all other ranks."""
        import torch
        import torch.distributed as dist

        from paceline.start.lifecycle import form_group

        self._leave(content["peer_ports"])
        rank, size, device = self._identity.rank, self._identity.size, torch.device(self._identity.device)
        form_group(dist.FileStore(content["store"], size), rank, size, content["backend"], device, FORM_S)
        _rejoin_replicas()

    def abort(self) -> None:
        """End all that NCCL does for this rank. Collectives on the device then return, and so do threads that wait in
        them.

        In a thread of its own: with a peer that is gone it may never return, and requests must still be answered.
        """
        import torch.distributed as dist

        if self._aborting is None and dist.is_initialized():
            work = dist.distributed_c10d._abort_process_group
            self._aborting = threading.Thread(target=work, name="paceline abort", daemon=True)
            self._aborting.start()

    def _leave(self, peer_ports: list[int]) -> None:
        """Leave the group. With connections severed first, nothing in it can wait for a rank that does not come."""
        import torch.distributed as dist

        from paceline.start.lifecycle import forget_failed_group

        if dist.is_initialized() and "nccl" in repr(dist.get_backend_config()):
            self.abort()
        if self._aborting is not None:
            self._aborting.join(ABORT_S)
            self._aborting = None
        sever_connections(peer_ports)
        if dist.is_initialized():
            try:
                dist.destroy_process_group()
            except RuntimeError:  # it is too broken to be left
                forget_failed_group()


def _rejoin_replicas() -> None:
    """Replicas of ours go on in the new group, in their next forward. Nothing is loaded to find out if there are."""
    if "paceline.replica.ddp" in sys.modules:
        from paceline.replica.membership import outlive_group

        outlive_group()


def local_ports() -> list[int]:
    """The local ports of all TCP sockets of this process."""
    return sorted({connection.getsockname()[1] for connection in _tcp_sockets()})


def sever_connections(peer_ports: Collection[int]) -> int:
    """Shut down connections to processes on this machine whose port is one of `peer_ports`. Returns how many."""
    found = 0
    for connection in _tcp_sockets():
        try:
            here, there = connection.getsockname(), connection.getpeername()
        except OSError:  # it listens, or has ended
            continue
        if there[0] == here[0] and there[1] in peer_ports:
            try:
                connection.shutdown(socket.SHUT_RDWR)
                found += 1
            except OSError:  # it has ended meanwhile
                continue
    return found


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
