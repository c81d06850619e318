"""Any torch.distributed backend as a transport."""

import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
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
from paceline.collectives.own_group import (
    abort_own_group,
    form_own_group,
    leave_own_group,
    obstacle_to,
    own_backends,
)
from paceline.collectives.peers import StoreCall
from paceline.collectives.shm.meet import tell_all
from paceline.collectives.spare import BorrowingWork, SpareMemory, gather_on_host
from paceline.collectives.torch_work import Pin, SlicedWork, StagedWork, StreamWork, current_device
from paceline.collectives.wait import finish
from paceline.collectives.watch import StoreWatch
from paceline.errors import UsageError

logger = logging.getLogger("paceline")

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
        own_group: Callable[[], dist.ProcessGroup] | None = None,
        devices: Collection[torch.device] = (),
        counts_as_several: bool = False,
    ) -> None:
        """`own_group` forms the group that moves the bytes instead of `group`, over the same ranks, when the first
        collective needs it. For it and `devices` see `apart`. `counts_as_several`: a group of one rank takes the path
        of several, to measure what that costs."""
        if not isinstance(group, dist.ProcessGroup):
            raise UsageError(f"expected a process group that this rank is a member of, got {group!r}")
        self._group = group
        self._form_own = own_group
        self._own: dist.ProcessGroup | None = None
        self._devices = devices
        self._counts_as_several = counts_as_several
        self._rank = group.rank()
        self._size = group.size()
        self._is_python = type(group) is not dist.ProcessGroup
        self._backends: dict[torch.device, str] = {}
        self._queued: dict[tuple[torch.device, torch.dtype, Op], AllreduceOptions] = {}
        self._recent: deque[Any] = deque(maxlen=16)
        self._spare = SpareMemory()
        self._watch = watch if watch is not None else watch_of(group)

    @cached_property
    def _moves(self) -> dist.ProcessGroup:
        """The group that moves the bytes."""
        if self._form_own is None:
            return self._group
        formed = self._form_own()
        self._own = formed if formed is not self._group else None
        return formed

    @cached_property
    def _pin(self) -> Pin:
        return Pin(self._moves)

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
        return self._size == 1 and not self._is_python and not self._counts_as_several

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
        known = self._queued.get((flat.device, flat.dtype, op))
        if known is not None:
            return self._queue_all_reduce(flat, op, known)
        check_reducible(flat, op)
        check_tree(op, self.trees(flat.device))
        if self._must_stage(flat):
            staged = flat.to(current_device())
            return StagedWork(self.all_reduce(staged, op), staged, flat)
        return self._start_all_reduce(flat, op)

    def _queue_all_reduce(self, flat: torch.Tensor, op: Op, options: AllreduceOptions) -> Work:
        """What was found to need nothing more than to be queued on a stream."""
        call = _described(flat.numel(), flat.dtype, op)
        try:
            raw = self._moves.allreduce([flat], options)
        except dist.DistBackendError as error:
            raise self._watch.explain(call, 0.0, error) from error
        self._watch.calls.began(call)
        return StreamWork(raw, flat, 1)

    def _start_all_reduce(self, flat: torch.Tensor, op: Op) -> Work:
        mean_after = op is Op.MEAN and self._backend(flat.device) != "nccl"
        native = _native(Op.SUM if mean_after else op)
        if self._is_python:
            return python_group.all_reduce(self._group, flat, native, self._size if mean_after else 1)
        options = AllreduceOptions()
        options.reduceOp = native
        call = describe("all_reduce", flat, op.value)
        with self._naming_the_lost(call):
            raw = self._moves.allreduce([_real(flat)], options)
        if self.queues(flat.device) and not mean_after and flat.layout is torch.strided and not flat.is_complex():
            self._queued[flat.device, flat.dtype, op] = options
        return self._begun(raw, call, flat, self._size if mean_after else 1)

    def broadcast(self, flat: torch.Tensor, root: int = 0) -> Work:
        check_root(root, self._size)
        if self._must_stage(flat):
            staged = flat.to(current_device())
            return StagedWork(self.broadcast(staged, root), staged, flat)
        if self._is_python:
            return python_group.broadcast(self._group, flat, root)
        options = BroadcastOptions()
        options.rootRank = root
        call = describe("broadcast", flat, f"root={root}")
        with self._naming_the_lost(call):
            raw = self._moves.broadcast([_real(flat)], options)
        return self._begun(raw, call, flat, 1)

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
        with self._naming_the_lost(call):
            raw = self._moves._allgather_base(filled, sent, AllgatherOptions())
        return self._begun(raw, call, out, 1)

    def exchange(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        check_exchange(out, flat, self._size)
        if self._must_stage(flat):
            staged = out.to(current_device())
            return StagedWork(self.exchange(staged, flat.to(current_device())), staged, out)
        if self._is_python:
            raise UsageError("a process group written in Python has no exchange; use a reduction that needs none")
        call = describe("exchange", flat, "")
        with self._naming_the_lost(call):
            raw = self._moves.alltoall_base(_real(out.view(-1)), _real(flat.reshape(-1)), [], [], AllToAllOptions())
        return self._begun(raw, call, out, 1)

    def apart(self, timeout_s: float | None = None, devices: Collection[torch.device] = ()) -> "TorchDistTransport":
        """See `Transport.apart`: connections (gloo) or a communicator (NCCL) of its own, for the tensors of `devices`.

        A backend that is neither cannot be duplicated: the user's own group is used then, and a line says so.
        """
        group = self._group
        devices = self._devices = devices or self._devices
        store = store_of(group)
        backends = own_backends(group, {device.type for device in devices})
        if self._size == 1:
            return self
        if store is None or not backends:
            backend = self._backend(next(iter(devices), torch.device("cpu")))
            _warn_of_sharing(self._rank, f"has a backend that cannot be duplicated ({backend})")
            return self
        number = store.add(f"paceline/replicas/{self._rank}", 1)
        watch = watch_of(group, line=f"replica {number}")

        def form() -> dist.ProcessGroup:
            own_store = PrefixStore(f"paceline/replica {number}", store)
            # Asked first: whoever cannot connect would leave the others waiting in gloo's constructor.
            told = tell_all(own_store, "able", self._rank, self._size, obstacle_to(backends), watch, timeout_s)
            if obstacles := [f"rank {rank}: {text.decode()}" for rank, text in enumerate(told) if text]:
                _warn_of_sharing(self._rank, f"could not be duplicated ({obstacles[0]})")
                return group
            # On a thread: gloo's constructor blocks until every rank is there.
            making = StoreCall(lambda _: form_own_group(backends, own_store, self._rank, self._size))
            finish(making, what=f"the forming of replica {number}'s own group", watch=watch, timeout_s=timeout_s)
            return making.result()

        return TorchDistTransport(group, watch=watch, own_group=form, devices=devices)

    def connect(self) -> "TorchDistTransport":
        """Form the own group now. All ranks do.

        NCCL connects in the first collective on a device. Were that in a backward, ranks could do it for two replicas
        in two orders, and wait for each other without end.
        """
        if self._form_own is not None and "nccl" in {self._backend(device) for device in self._devices}:
            for device in sorted(self._devices, key=str):
                first = torch.zeros(1, device=device)
                finish(self.all_reduce(first), what="the first collective of a replica", watch=self._watch)
        _ = self._moves
        return self

    def close(self) -> None:
        """A group of its own is given up. Any other belongs to whoever made it."""
        own, self._own = self._own, None
        if own is not None:
            leave_own_group(own, list(self._recent)[-1:])

    def abort(self) -> None:
        """End what is under way on a device, also if it waits for a rank that never comes. What was computed from it is
        of no use, nor is the transport afterwards."""
        if self._own is not None:
            abort_own_group(self._own)

    def _must_stage(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor meets a group that only moves device memory, as one formed with "nccl" alone does."""
        return tensor.device.type == "cpu" and not self._is_python and self._backend(tensor.device) in ("", "nccl")

    def _backend(self, device: torch.device) -> str:
        found = self._backends.get(device)
        if found is None:
            try:
                found = str(self._moves._get_backend(device).name())
            except (RuntimeError, NotImplementedError):
                # Our own duplicate has no backend for this kind of device; a group written in Python has none at all.
                found = str(self._group.name()) if self._form_own is None else ""
            self._backends[device] = found
        return found

    @contextmanager
    def _naming_the_lost(self, call: str) -> Iterator[None]:
        """A collective that cannot even be started, because a connection has broken, says who was lost."""
        try:
            yield
        except dist.DistBackendError as error:
            raise self._watch.explain(call, 0.0, error) from error

    def _begun(self, raw: Any, call: str, tensor: torch.Tensor, divide_by: int) -> Work:
        self._watch.calls.began(call)
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


def _warn_of_sharing(rank: int, why: str) -> None:
    if rank == 0:
        logger.warning(
            "the process group %s, so gradients are reduced over the group itself: run no other collectives on it "
            "while a backward runs",
            why,
        )


@cache
def _described(numel: int, dtype: torch.dtype, op: Op) -> str:
    return describe("all_reduce", torch.empty(numel, dtype=dtype, device="meta"), op.value)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
