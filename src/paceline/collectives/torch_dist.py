"""Any torch.distributed backend as a transport, and its work objects, waited for in slices."""

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions, BroadcastOptions

from paceline.collectives.group import finish
from paceline.collectives.own_group import Carrier, duplicate
from paceline.collectives.protocols import (
    CollectiveCall,
    Op,
    Traits,
    Work,
    check_all_to_all,
    check_gather,
    check_reducible,
    check_root,
)
from paceline.collectives.spare_memory import SpareMemory
from paceline.collectives.stream_work import StreamWork
from paceline.collectives.torch_ops import scatter_options
from paceline.collectives.torch_routes import PreparedAllReduce, Route, find_route, prepare_all_reduce
from paceline.collectives.torch_store import watch_of
from paceline.collectives.wait import FutureWork
from paceline.collectives.watch import StoreWatch
from paceline.errors import UsageError

SMALL = 16384  # elements


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
        collective needs it. For it and `devices` see `dup`. `counts_as_several`: a group of one rank takes the path of
        several, to measure what that costs."""
        if not isinstance(group, dist.ProcessGroup):
            raise UsageError(f"expected a process group that this rank is a member of, got {group!r}")
        self.users_group = group
        self.rank = group.rank()
        self.size = group.size()
        self.watch = watch if watch is not None else watch_of(group)
        self.carrier = Carrier(group, own_group)
        self._devices = devices
        self.counts_as_several = counts_as_several
        self._routes: dict[torch.device, Route] = {}
        self._prepared: dict[tuple[torch.device, torch.dtype, torch.layout, Op], PreparedAllReduce] = {}
        self._recent: deque[Any] = deque(maxlen=16)
        self._spare = SpareMemory()

    @cached_property
    def _pin(self) -> "Pin":
        return Pin(self.carrier.group)

    def traits(self, device: torch.device) -> Traits:
        known = self._routes.get(device)
        return (known or self._route(device)).traits

    def progress(self) -> None:
        """The backend's own threads and streams do all the work."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, flat: torch.Tensor, op: Op = Op.SUM) -> Work:
        kind = flat.device, flat.dtype, flat.layout, op
        prepared = self._prepared.get(kind)
        first = prepared is None
        if prepared is None:
            prepared = self._prepared[kind] = prepare_all_reduce(self._route(flat.device), flat, op, self.size)
        route, options, divide_by = prepared
        if route.detour is not None:
            return route.detour.all_reduce(flat, op)
        call = CollectiveCall("all_reduce", flat.dtype, flat.layout, flat.shape, op.value)
        try:
            raw = self.carrier.group.allreduce([_real(flat)], options)
        except dist.DistBackendError as error:
            raise self.watch.explain(str(call), 0.0, error) from error
        if route.traits.stream_ordered and not first:
            # `close` must not ask it whether it is complete: a CUDA graph that is captured may contain it.
            self.watch.calls.began(call)
            return StreamWork(raw, flat, divide_by)
        return self._begun(raw, call, flat, divide_by)

    def broadcast(self, flat: torch.Tensor, root: int = 0) -> Work:
        check_root(root, self.size)
        detour = self._route(flat.device).detour
        if detour is not None:
            return detour.broadcast(flat, root)
        options = BroadcastOptions()
        options.rootRank = root
        call = CollectiveCall.of("broadcast", flat, f"root={root}")
        with self._naming_the_lost(call):
            raw = self.carrier.group.broadcast([_real(flat)], options)
        return self._begun(raw, call, flat, 1)

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> Work:
        if out.dtype != part.dtype or out.numel() != self.size * part.numel():
            check_gather(out, part, self.size)
        route = self._routes.get(part.device) or self._route(part.device)
        if route.detour is not None:
            return route.detour.all_gather(out, part)
        call = CollectiveCall("all_gather", part.dtype, part.layout, part.shape, "")
        sent, filled = part.detach().reshape(-1), out.view(-1)
        if part.is_complex():
            sent, filled = torch.view_as_real(sent), torch.view_as_real(filled)
        if not route.gathers_by_copies:
            with self._naming_the_lost(call):
                raw = self.carrier.group._allgather_base(filled, sent, AllgatherOptions())
            return self._begun(raw, call, out, 1)
        # Every rank sends its part to every other. gloo's own all_gather takes twice as long, at all sizes: it fills
        # new memory and copies that, on a thread whose heap keeps it.
        # Small buffers are not worth keeping.
        lent = None if filled.numel() < SMALL else (self._spare, self._spare.take(filled.numel(), filled.dtype))
        copies = torch.empty_like(filled) if lent is None else lent[1][: filled.numel()]
        copies.view(self.size, -1).copy_(sent.view(-1))  # a part may be empty
        with self._naming_the_lost(call):
            raw = self.carrier.group.alltoall_base(filled, copies, [], [], AllToAllOptions())
        return self._begun(raw, call, out, 1, lent)

    def all_to_all(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        check_all_to_all(out, flat, self.size)
        detour = self._route(flat.device).detour
        if detour is not None:
            return detour.all_to_all(out, flat)
        call = CollectiveCall.of("all_to_all", flat, "")
        filled, sent = _real(out.view(-1)), _real(flat.reshape(-1))
        with self._naming_the_lost(call):
            raw = self.carrier.group.alltoall_base(filled, sent, [], [], AllToAllOptions())
        return self._begun(raw, call, out, 1)

    def reduce_scatter_tensor(self, out: torch.Tensor, flat: torch.Tensor, op: Op = Op.SUM) -> Work:
        check_reducible(flat, op)
        options, divides = scatter_options(op, self._route(flat.device).backend)
        call = CollectiveCall.of("reduce_scatter", flat, op.value)
        with self._naming_the_lost(call):
            raw = self.carrier.group._reduce_scatter_base(_real(out), _real(flat), options)
        return self._begun(raw, call, out, self.size if divides else 1)

    def _begun(
        self,
        raw: Any,
        call: CollectiveCall,
        tensor: torch.Tensor,
        divide_by: int,
        lent: tuple[SpareMemory, torch.Tensor] | None = None,
    ) -> Work:
        self.watch.calls.began(call)
        if tensor.numel() < SMALL:
            # Kept for a while, so that gloo's thread does not drop the last reference: a work object holds
            # Python objects, and a thread that asks for the interpreter while that ends aborts the process.
            self._recent.append(raw)
        if self._routes[tensor.device].traits.stream_ordered:
            return StreamWork(raw, tensor, divide_by)
        return SlicedWork(raw, tensor, divide_by, self._pin, lent)

    def sliced(self, raw: Any, tensor: torch.Tensor, divide_by: int) -> "SlicedWork":
        """A work object of a group written in Python, as a `Work`."""
        return SlicedWork(raw, tensor, divide_by, self._pin, None)

    def dup(self, timeout_s: float | None = None, devices: Collection[torch.device] = ()) -> "TorchDistTransport":
        """See `Transport.dup`: connections (gloo) or a communicator (NCCL) of its own, for the tensors of `devices`.

        A backend that is neither cannot be duplicated: the user's own group is used then, and a warning says so.
        """
        devices = devices or self._devices
        own = None if self.size == 1 else duplicate(self.users_group, devices, timeout_s)
        if own is None:
            return self
        watch, form = own
        return TorchDistTransport(self.users_group, watch=watch, own_group=form, devices=devices)

    def connect(self) -> "TorchDistTransport":
        """Form the own group now. All ranks call it.

        NCCL connects in the first collective on a device. In a backward, ranks could do that for two replicas
        in two orders, and wait for each other forever.
        """
        if self.carrier.duplicates and "nccl" in {self._route(device).backend for device in self._devices}:
            for device in sorted(self._devices, key=str):
                first = torch.zeros(1, device=device)
                finish(self.all_reduce(first), what="the first collective of a replica", watch=self.watch)
        _ = self.carrier.group
        return self

    def close(self) -> None:
        """Release a group of its own. Any other belongs to its creator."""
        self.carrier.leave(list(self._recent)[-1:])

    def _route(self, device: torch.device) -> Route:
        known = self._routes.get(device)
        if known is None:
            known = self._routes[device] = find_route(self, device)
        return known

    @contextmanager
    def _naming_the_lost(self, call: CollectiveCall) -> Iterator[None]:
        """Name the lost rank if a collective cannot even be started because a connection has broken."""
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistBackendError) or str(error).startswith("NCCL Error")):  # of all_to_all
                raise
            raise self.watch.explain(str(call), 0.0, error) from error


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


class SlicedWork:
    """A collective that host threads carry out, as gloo's do: it can be waited for in slices."""

    def __init__(
        self, raw: Any, tensor: torch.Tensor, divide_by: int, pin: "Pin", lent: tuple[SpareMemory, torch.Tensor] | None
    ) -> None:
        """`lent`: memory that it reads from until it is complete."""
        self._raw = raw
        self._tensor = tensor
        self._divide_by = divide_by
        self._pin: Pin | None = pin
        self._lent = lent
        self._complete = False
        pin.hold()

    def done(self) -> bool:
        return self._complete or self._raw_done()

    def wait(self, seconds: float) -> bool:
        if self._complete:
            return True
        if not self._wait_raw(seconds):
            return False
        self._unpin()
        if self._divide_by > 1:
            with torch.no_grad():
                self._tensor.div_(self._divide_by)
        if self._lent is not None:
            spare, memory = self._lent
            spare.give_back(memory)
            self._lent = None
        self._complete = True
        return True

    def _wait_raw(self, seconds: float) -> bool:
        """Wait for one slice. Returns whether it is complete; raises if it failed."""
        try:
            waited = self._raw.wait(timedelta(seconds=max(seconds, 0.001)))  # gloo takes 0 ms for "no limit"
            return waited is not False or self._raw_done()
        except TypeError:  # a Work written in Python need not take a timeout
            return self._raw.wait() is not False or self._raw_done()
        except (RuntimeError, TimeoutError) as error:
            if "not implemented" in str(error):  # one made from a future does not take one either
                return FutureWork(self._raw.get_future()).wait(seconds)
            if not self._raw_done():
                if isinstance(error, TimeoutError) or "timed out" in str(error).lower():
                    return False  # the slice is over, nothing else
                raise
        # It failed, or completed just after the slice: another wait returns at once and shows which.
        self._unpin()
        self._raw.wait()
        return True

    def _raw_done(self) -> bool:
        try:
            return bool(self._raw.is_completed())
        except (AttributeError, NotImplementedError):  # nor support this query
            return False

    def _unpin(self) -> None:
        if self._pin is not None:
            self._pin.release()
            self._pin = None

    def __del__(self) -> None:
        if getattr(self, "_pin", None) is None:
            return
        if self._raw_done():
            self._unpin()
        else:
            # Abandoned: gloo's thread must not be the one that frees these, see `collectives.store_call`.
            for held in (self._raw, self._tensor):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


class Pin:
    """Keeps a process group from being destroyed while a collective of it is in flight.

    Why a group must not be destroyed then
    --------------------------------------
    The destructor of ProcessGroupGloo joins its threads, and a thread whose peer never comes waits for the group's
    timeout (30 minutes). It runs in `dist.destroy_process_group()` and when the interpreter clears its modules, so a
    rank that was interrupted could not exit. Gloo's `abort` and `shutdown` do nothing about it (measured, torch 2.13).
    A reference that is never released skips the destructor: the kernel ends the threads with the process.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._flights = 0
        self._lock = threading.Lock()

    def hold(self) -> None:
        with self._lock:
            self._flights += 1
            if self._flights == 1:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def release(self) -> None:
        with self._lock:
            self._flights -= 1
            if self._flights == 0:
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._group))
