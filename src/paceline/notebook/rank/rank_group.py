"""The process group of a rank: one per generation.

**Why a file and not a port.** The ranks of a notebook meet over a file in the session's private folder. No rank
listens, so no rank is special: any of them may die and be started again while the others live on. A rank that waits at
the file of an old generation can be freed from outside, by making the file unreadable (`rank_kernels/interrupt.py`).

**Why connections are severed.** What an interrupt cannot end by a signal, it ends by shutting down the sockets between
ranks (`tcp_connections.py` says why): the collective raises at once, Python runs again, and raises KeyboardInterrupt.
"""

import sys
import threading
from collections.abc import Mapping
from typing import Any

from paceline.notebook.rank.rank_setup import RankIdentity
from paceline.tcp_connections import sever_connections

FORM_S = 30.0
ABORT_S = 5.0


class RankProcessGroup:
    """The process group of this rank, and how the rank leaves it."""

    def __init__(self, identity: RankIdentity) -> None:
        self._identity = identity
        self._aborting: threading.Thread | None = None

    def form(self, content: Mapping[str, Any]) -> None:
        """Leave the previous generation, if there was one, and join the next with all other ranks."""
        import torch
        import torch.distributed as dist

        from paceline.start.forming import form_group

        self._leave(content["peer_ports"])
        rank, size, device = self._identity.rank, self._identity.size, torch.device(self._identity.device)
        form_group(dist.FileStore(content["store"], size), rank, size, content["backend"], device, FORM_S)
        _rejoin_replicas()

    def abort(self) -> None:
        """Abort all NCCL work of this rank. Collectives on the device then return, and so do threads that wait in
        them.

        In a thread of its own: with a dead peer it may never return, and requests must still be answered.
        """
        import torch.distributed as dist

        if self._aborting is None and dist.is_initialized():
            from paceline.collectives.own_group import abort_all

            self._aborting = threading.Thread(target=abort_all, name="paceline abort", daemon=True)
            self._aborting.start()

    def _leave(self, peer_ports: list[int]) -> None:
        """Leave the group. With connections severed first, nothing in it can wait for a rank that will not come."""
        import torch.distributed as dist

        from paceline.start.forming import leave_group

        if dist.is_initialized() and "nccl" in repr(dist.get_backend_config()):
            self.abort()
        if self._aborting is not None:
            self._aborting.join(ABORT_S)
            self._aborting = None
        sever_connections(peer_ports)
        leave_group()


def _rejoin_replicas() -> None:
    """paceline's replicas continue in the new group, in their next forward. Nothing is loaded to find them."""
    if "paceline.replica.ddp" in sys.modules:
        from paceline.replica.membership import outlive_group

        outlive_group()
