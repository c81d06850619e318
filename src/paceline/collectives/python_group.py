"""Process groups that Python code defines and torch does not list: only their own methods can be called."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions

from paceline.collectives.protocols import Op, Work
from paceline.collectives.torch_ops import reduce_options
from paceline.collectives.wait import FutureWork
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.collectives.torch_dist import TorchDistTransport


class PythonGroup:
    """The collectives of such a group."""

    def __init__(self, group: dist.ProcessGroup, backend: str, transport: "TorchDistTransport") -> None:
        self._group = group
        self._backend = backend
        self._transport = transport

    def all_reduce(self, flat: torch.Tensor, op: Op) -> Work:
        options, divides = reduce_options(op, self._backend)
        divide_by = self._group.size() if divides else 1
        raw = self._group.allreduce([flat], options)
        try:
            return FutureWork(raw.get_future(), (lambda: flat.detach().div_(divide_by)) if divide_by > 1 else None)
        except RuntimeError:  # a work object need not have a future
            return self._transport.sliced(raw, flat, divide_by)

    def broadcast(self, flat: torch.Tensor, root: int) -> Work:
        options = BroadcastOptions()
        options.rootRank = root
        return self._transport.sliced(self._group.broadcast([flat], options), flat, 1)

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> Work:
        outs = list(out.view(self._group.size(), -1).unbind())
        return self._transport.sliced(self._group.allgather([outs], [part.reshape(-1)], AllgatherOptions()), out, 1)

    def all_to_all(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        raise UsageError("a process group written in Python has no all_to_all; use a reduction that needs none")
