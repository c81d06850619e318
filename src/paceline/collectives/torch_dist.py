"""Any torch.distributed backend as a transport."""

import os
from collections import deque
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    PrefixStore,
    Store,
)

from paceline.collectives import python_group
from paceline.collectives.api import (
    Op,
    Watch,
    Work,
    check_exchange,
    check_gather,
    check_reducible,
    check_root,
    check_tree,
    describe,
)
from paceline.collectives.finite import ADDING, Sent
from paceline.collectives.own_group import form_own_group, leave_own_group, own_backends
from paceline.collectives.peers import StoreCall
from paceline.collectives.spare import BorrowingWork, SpareMemory, gather_on_host
from paceline.collectives.torch_work import Pin, SeenWork, SlicedWork, StagedWork, StreamWork, current_device
from paceline.collectives.wait import finish
from paceline.collectives.watch import StoreWatch
from paceline.errors import UsageError

SMALL = 16384  # elements
_ADDS_PLAINLY = ("gloo", "nccl")  # in the type of the tensors

_REDUCE_OPS = {
    Op.SUM: dist.ReduceOp.SUM,
    Op.TREE: dist.ReduceOp.SUM,  # where `trees` allows it
    Op.PRODUCT: dist.ReduceOp.PRODUCT,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
}


class TorchDistTransport:
    """Collectives of a torch process group. Ranks are numbered within the group.

    A group with an abandoned collective (Ctrl-C, PeerAbsent, PeerLost) cannot be used again, but the process can exit
    and the group can be destroyed at once: see `Pin`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        watch: StoreWatch | None = None,
        own_group: dist.ProcessGroup | None = None,
        devices: Collection[torch.device] = (),
    ) -> None:
        """`own_group` moves the bytes instead of `group`, over the same ranks. For it and `devices` see `apart`."""
        if not isinstance(group, dist.ProcessGroup):
            raise UsageError(f"expected a process group that this rank is a member of, got {group!r}")
        self._group = group
        self._own = own_group
        self._moves = own_group or group
        self._devices = devices
        self._rank = group.rank()
        self._size = group.size()
        self._is_python = type(group) is not dist.ProcessGroup
        self._pin = Pin(self._moves)
        self._backends: dict[torch.device, str] = {}
        self._recent: deque[Any] = deque(maxlen=16)
        self._sent, self._spare = Sent(), SpareMemory()
        self._watch = watch if watch is not None else watch_of(group)

    @property
    def group(self) -> dist.ProcessGroup:
        return self._group

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def watch(self) -> Watch:
        return self._watch

    @property
    def alone(self) -> bool:
        return self._size == 1 and not self._is_python

    @property
    def inline(self) -> bool:
        return False

    def averages(self, device: torch.device) -> bool:
        return not self._is_python and device.type == "cuda" and self._backend(device) == "nccl"

    def trees(self, device: torch.device) -> bool:
        # The sum of two is one addition, rounded once: any order gives the bits of torch's `a + b`.
        return not self._is_python and (self._size == 1 or (self._size == 2 and self._backend(device) in _ADDS_PLAINLY))

    def queues(self, device: torch.device) -> bool:
        return not self._is_python and device.type != "cpu" and self._backend(device) != "gloo"

    def exchanges(self, device: torch.device) -> bool:
        return not self._is_python

    def progress(self) -> None:
        """The backend's own threads and streams do all the work."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, flat: torch.Tensor, op: Op = Op.SUM) -> Work:
        check_reducible(flat, op)
        check_tree(op, self.trees(flat.device))
        if self._must_stage(flat):
            staged = flat.to(current_device())
            return StagedWork(self.all_reduce(staged, op), staged, flat)
        look = self._sent.look(flat, self._size) if op in ADDING else None
        work = self._start_all_reduce(flat, op)
        return work if look is None else SeenWork(work, look, flat)

    def _start_all_reduce(self, flat: torch.Tensor, op: Op) -> Work:
        mean_after = op is Op.MEAN and self._backend(flat.device) != "nccl"
        native = _native(Op.SUM if mean_after else op)
        if self._is_python:
            return python_group.all_reduce(self._group, flat, native, self._size if mean_after else 1)
        options = AllreduceOptions()
        options.reduceOp = native
        raw = self._moves.allreduce([_real(flat)], options)
        return self._begun(raw, describe("all_reduce", flat, op.value), flat, self._size if mean_after else 1)

    def broadcast(self, flat: torch.Tensor, root: int = 0) -> Work:
        check_root(root, self._size)
        if self._must_stage(flat):
            staged = flat.to(current_device())
            return StagedWork(self.broadcast(staged, root), staged, flat)
        if self._is_python:
            return python_group.broadcast(self._group, flat, root)
        options = BroadcastOptions()
        options.rootRank = root
        raw = self._moves.broadcast([_real(flat)], options)
        return self._begun(raw, describe("broadcast", flat, f"root={root}"), flat, 1)

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> Work:
        check_gather(out, part, self._size)
        if self._must_stage(part):
            staged = out.to(current_device())
            return StagedWork(self.all_gather(staged, part.to(current_device())), staged, out)
        if self._is_python:
            return python_group.all_gather(self._group, out, part)
        call, sent, filled = describe("all_gather", part, ""), _real(part.detach().reshape(-1)), _real(out.view(-1))
        if self._backend(part.device) == "gloo" and part.device.type == "cpu":
            raw, memory = gather_on_host(self._moves, filled, sent, self._spare)
            return BorrowingWork(self._begun(raw, call, out, 1), self._spare, memory)
        return self._begun(self._moves._allgather_base(filled, sent, AllgatherOptions()), call, out, 1)

    def exchange(self, out: torch.Tensor, flat: torch.Tensor, adds: int = 1) -> Work:
        check_exchange(out, flat, self._size)
        if self._must_stage(flat):
            staged = out.to(current_device())
            return StagedWork(self.exchange(staged, flat.to(current_device()), adds), staged, out)
        if self._is_python:
            raise UsageError("a process group written in Python has no exchange; use a reduction that needs none")
        self._sent.exchanged(flat, adds)
        raw = self._moves.alltoall_base(_real(out.view(-1)), _real(flat.reshape(-1)), [], [], AllToAllOptions())
        return self._begun(raw, describe("exchange", flat, ""), out, 1)

    def saw_sum(self, flat: torch.Tensor) -> None:
        self._sent.summed(flat)

    def find_not_finite(self, on: bool) -> None:
        self._sent.turn(on)

    def not_finite(self) -> frozenset[int]:
        return frozenset([self._rank] if self._sent.taken() else [])

    def apart(self, timeout_s: float | None = None, devices: Collection[torch.device] = ()) -> "TorchDistTransport":
        """See `Transport.apart`. The first one to ask stays with the group itself; each one after it gets connections
        (gloo) and communicators (NCCL) of its own, the latter for `devices`: those that its tensors will be on."""
        group = self._group
        devices = self._devices = devices or self._devices
        store = store_of(group)
        backends = own_backends(group)
        if store is None or not backends:
            return self
        number = store.add(f"paceline/replicas/{self._rank}", 1)
        if number == 1:
            return self
        watch = watch_of(group, line=f"replica {number}")
        own_store = PrefixStore(f"paceline/replica {number}", store)
        # On a thread: gloo's constructor blocks until every rank is there.
        making = StoreCall(lambda _: form_own_group(backends, own_store, self._rank, self._size))
        finish(making, what=f"the forming of replica {number}'s own group", watch=watch, timeout_s=timeout_s)
        apart = TorchDistTransport(group, watch=watch, own_group=making.result(), devices=devices)
        if "nccl" in backends:
            # NCCL connects in the first collective on a device. Were that in a backward, ranks could do it for two
            # replicas in two orders, and wait for each other without end.
            on = sorted((device for device in devices if device.type == "cuda"), key=str) or [current_device()]
            for device in on:
                first = torch.zeros(1, device=device)
                finish(apart.all_reduce(first), what=f"replica {number}'s first collective", watch=watch)
        return apart

    def close(self) -> None:
        """A group of its own is given up. Any other belongs to whoever made it."""
        own, self._own = self._own, None
        if own is not None:
            leave_own_group(own, list(self._recent)[-1:])

    def _must_stage(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor meets a group that only moves device memory, as one formed with "nccl" alone does."""
        return tensor.device.type == "cpu" and not self._is_python and self._backend(tensor.device) == "nccl"

    def _backend(self, device: torch.device) -> str:
        found = self._backends.get(device)
        if found is None:
            try:
                found = str(self._group._get_backend(device).name())
            except (RuntimeError, NotImplementedError):  # a process group written in Python has no backends
                found = str(self._group.name())
            self._backends[device] = found
        return found

    def _begun(self, raw: Any, call: str, tensor: torch.Tensor, divide_by: int) -> Work:
        self._watch.began(call)
        if tensor.numel() < SMALL:
            # Kept for a while, so that it is not gloo's thread that drops the last reference: a work object holds
            # Python objects, and a thread that asks for the interpreter while that ends aborts the process.
            self._recent.append(raw)
        if self.queues(tensor.device):
            return StreamWork(raw, tensor, divide_by)
        return SlicedWork(raw, tensor, divide_by, self._pin)


def watch_of(
    group: dist.ProcessGroup, *, line: str | None = None, announce: bool = True, report_after_s: float = 3.0
) -> StoreWatch:
    """A watch over the ranks of a torch process group, through the group's own store."""
    store = store_of(group)
    rank, size = group.rank(), group.size()
    if line is None and store is not None:
        # The n-th transport over a group on one rank matches the n-th on another.
        line = f"transport {store.add(f'paceline/transports/{rank}', 1)}"
    return StoreWatch(
        store,
        rank,
        size,
        line=line or "",
        announce=announce,
        store_host=_store_host(group, store),
        report_after_s=report_after_s,
    )


def store_of(group: dist.ProcessGroup) -> Store | None:
    """The store that a group was formed with. None for a group that torch does not know."""
    entry = distributed_c10d._world.pg_map.get(group)
    return entry[1] if entry is not None else None


def _store_host(group: dist.ProcessGroup, store: Store | None) -> int | None:
    """The rank whose process answers for a TCPStore: global rank 0, unless a launcher's agent does."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not isinstance(store, TCPStore) or agents or 0 not in dist.get_process_group_ranks(group):
        return None
    return dist.get_group_rank(group, 0)


def _native(op: Op) -> Any:
    return dist.ReduceOp.AVG if op is Op.MEAN else _REDUCE_OPS[op]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
