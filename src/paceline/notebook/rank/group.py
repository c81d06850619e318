"""The process group of a rank: one per generation.

**Why a file and not a port.** The ranks of a notebook meet over a file in the session's private folder. Nobody listens,
so no rank is special: any of them may die and be started again while the others live on. Whoever waits at the file of
an old generation can be freed from outside, by making the file unreadable (`notebook/fleet/interrupt.py`).
"""

import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from paceline.notebook.rank import wires
from paceline.notebook.rank.boot import Place

FORM_S = 30.0
ABORT_S = 5.0


class Group:
    """Which group this rank is in, and how it gets out of it."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._aborting: threading.Thread | None = None

    def form(self, content: Mapping[str, Any]) -> Mapping[str, Any]:
        """Leave the generation before, if there was one, and join the next with all other ranks."""
        import torch
        import torch.distributed as dist

        from paceline.start.api import use_default_timeout

        self._leave(content["theirs"])
        backend, device = content["backend"], torch.device(self._place.device)
        try:
            dist.init_process_group(
                backend,
                store=dist.FileStore(content["store"], self._place.size),
                rank=self._place.rank,
                world_size=self._place.size,
                timeout=timedelta(seconds=FORM_S),
                # NCCL then connects here, where a failure is told as one, and not inside the first cell.
                device_id=device if device.type == "cuda" and "nccl" in backend else None,
            )
        except (RuntimeError, ValueError):
            _forget()
            raise
        use_default_timeout(backend)
        return {"generation": content["generation"]}

    def abort(self) -> None:
        """End all that NCCL does for this rank. Collectives on the device then return, and so does who waits for them.

        In a thread of its own: with a peer that is gone it may never return, and questions must still be answered.
        """
        import torch.distributed as dist

        if self._aborting is None and dist.is_initialized():
            work = dist.distributed_c10d._abort_process_group
            self._aborting = threading.Thread(target=work, name="paceline abort", daemon=True)
            self._aborting.start()

    def _leave(self, theirs: list[int]) -> None:
        """Give up the group. With the wires cut first, nothing in it can wait for a rank that does not come."""
        import torch.distributed as dist

        if dist.is_initialized() and "nccl" in repr(dist.get_backend_config()):
            self.abort()
        if self._aborting is not None:
            self._aborting.join(ABORT_S)
            self._aborting = None
        wires.cut(theirs)
        if dist.is_initialized():
            try:
                dist.destroy_process_group()
            except RuntimeError:  # it was broken so badly that it could not even be left
                _forget()


def outlive() -> None:
    """Replicas of ours go on in the new group, in their next forward. Nothing is loaded to find out if there are."""
    if "paceline.replica.ddp" in sys.modules:
        from paceline.replica.rejoin import outlive_group

        outlive_group()


def _forget() -> None:
    # torch counts a group that failed, and names the next one by the count: this rank would never again meet ranks
    # that counted otherwise. Destroying a default group, even of one rank, starts the count anew.
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
