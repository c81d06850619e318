"""The work objects of torch.distributed as ours: waited for in slices, or on a stream, or on a device copy."""

import ctypes
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.collectives.api import Work
from paceline.collectives.event_work import EventWork


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

    def __init__(self, raw: Any, tensor: torch.Tensor, divide_by: int, pin: Pin) -> None:
        self._raw = raw
        self._tensor = tensor
        self._divide_by = divide_by
        self._pin: Pin | None = pin
        self._complete = False
        pin.hold()

    def done(self) -> bool:
        return self._complete or self._raw_done()

    def wait(self, seconds: float) -> bool:
        if self._complete:
            return True
        failure: Exception | None = None
        try:
            waited = self._wait_raw(seconds)
        except (RuntimeError, TimeoutError) as error:
            waited, failure = False, error
        if failure is not None and not self._raw_done():
            try:
                if isinstance(failure, TimeoutError) or "timed out" in str(failure).lower():
                    return False
                raise failure
            finally:
                failure = None  # its traceback holds this frame: the two would keep the tensor in memory
        failed, failure = failure is not None, None
        if not failed and waited is False and not self._raw_done():
            return False
        self._unpin()
        if failed:
            self._raw.wait()  # it failed, or completed just after the slice: this returns at once and tells which
        if self._divide_by > 1:
            with torch.no_grad():
                self._tensor.div_(self._divide_by)
        self._complete = True
        return True

    def _wait_raw(self, seconds: float) -> object:
        try:
            return self._raw.wait(timedelta(seconds=max(seconds, 0.001)))  # gloo takes 0 ms for "no limit"
        except TypeError:  # a Work written in Python need not take a timeout
            return self._raw.wait()

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
            # Abandoned: gloo's thread must not be the one that frees these, see `collectives.ending`.
            for held in (self._raw, self._tensor):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


class StreamWork:
    """A collective on a device's stream, as NCCL's: waiting orders the current stream after it, not the host."""

    def __init__(self, raw: Any, tensor: torch.Tensor, divide_by: int) -> None:
        self._raw = raw
        self._tensor = tensor
        self._divide_by = divide_by
        self._ordered = False

    def done(self) -> bool:
        # While a CUDA graph is captured nothing runs yet, and asking an event would end the capture.
        return not torch.cuda.is_current_stream_capturing() and bool(self._raw.is_completed())

    def wait(self, seconds: float) -> bool:
        if not self._ordered:
            self._raw.wait()  # with a timeout NCCL would block the host
            if self._divide_by > 1:
                with torch.no_grad():
                    self._tensor.div_(self._divide_by)
            self._ordered = True
        return True


class StagedWork:
    """A collective on a device copy of a host tensor: complete when the result is back in the host tensor."""

    def __init__(self, work: Work, staged: torch.Tensor, home: torch.Tensor) -> None:
        self._work = work
        self._staged = staged
        self._home = home
        self._landing: tuple[torch.Tensor, EventWork] | None = None
        self._complete = False

    def done(self) -> bool:
        return self._complete or self._work.done()

    def wait(self, seconds: float) -> bool:
        """A plain copy to the host would wait for the device, and so for all ranks, deaf to everything else."""
        if self._complete:
            return True
        if self._landing is None:
            if not self._work.wait(seconds):
                return False
            host = torch.empty(self._staged.shape, dtype=self._staged.dtype, device="cpu", pin_memory=True)
            host.copy_(self._staged, non_blocking=True)
            self._landing = host, EventWork(torch.cuda.current_stream(self._staged.device).record_event())
        host, landed = self._landing
        if landed.wait(seconds):
            self._home.copy_(host.view_as(self._home))
            self._landing = None
            self._complete = True
        return self._complete


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
