"""The work objects of torch.distributed as ours, waited for in slices, and what they hold meanwhile."""

import ctypes
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.collectives.wait import FutureWork

MOST_BYTES = 1 << 24  # of spare memory, kept at most, of one type


class Pin:
    """Keeps a process group from being destroyed while a collective of it is in flight.

    Why a group must not be destroyed then
    --------------------------------------
    The destructor of ProcessGroupGloo joins its threads, and a thread whose peer never comes waits for the group's
    timeout (30 minutes). It runs in `dist.destroy_process_group()` and when the interpreter clears its modules, so a
    rank that was interrupted could not exit. Gloo's `abort` and `shutdown` do nothing about it (measured, torch 2.13).
    A reference that nobody gives back skips the destructor: the kernel ends the threads with the process.
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


class SlicedWork:
    """A collective that host threads carry out, as gloo's do: it can be waited for in slices."""

    def __init__(
        self, raw: Any, tensor: torch.Tensor, divide_by: int, pin: Pin, lent: "tuple[SpareMemory, torch.Tensor] | None"
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
            if "not implemented" in str(error):  # one that was made from a future takes none either
                return FutureWork(self._raw.get_future()).wait(seconds)
            if not self._raw_done():
                if isinstance(error, TimeoutError) or "timed out" in str(error).lower():
                    return False  # the slice is over, nothing else
                raise
        # It failed, or completed just after the slice: another wait returns at once and tells which.
        self._unpin()
        self._raw.wait()
        return True

    def _raw_done(self) -> bool:
        try:
            return bool(self._raw.is_completed())
        except (AttributeError, NotImplementedError):  # nor be able to tell
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


class SpareMemory:
    """Flat memory on the host that is used again: the first touch of new memory is slow, and the C library may not
    return it to the system.

    Whoever takes some has it to itself until it is given back. A collective that nobody waited for never gives back
    what it may still write to.
    """

    def __init__(self) -> None:
        self._free: dict[torch.dtype, list[torch.Tensor]] = {}

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for at least `count` numbers, with anything in it."""
        free = self._free.setdefault(dtype, [])
        found = free.pop() if free else None
        return found if found is not None and found.numel() >= count else torch.empty(count, dtype=dtype, device="cpu")

    def give_back(self, memory: torch.Tensor) -> None:
        free = self._free.setdefault(memory.dtype, [])
        if memory.nbytes + sum(other.nbytes for other in free) <= MOST_BYTES:
            free.append(memory)

    def __reduce__(self) -> tuple[type["SpareMemory"], tuple[()]]:
        return type(self), ()
