"""Process groups that Python code defines and torch does not list: only their own methods can be called."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from paceline.collectives.api import Work
from paceline.collectives.wait import FutureWork


def all_reduce(group: dist.ProcessGroup, flat: torch.Tensor, op: Any, divide_by: int) -> Work:
    options = AllreduceOptions()
    options.reduceOp = op
    raw = group.allreduce([flat], options)
    try:
        work: Work = FutureWork(raw.get_future())
    except RuntimeError:  # a work object need not have a future
        work = _PythonWork(raw)
    return work if divide_by == 1 else _DividedWork(work, flat, divide_by)


def broadcast(group: dist.ProcessGroup, flat: torch.Tensor, root: int) -> Work:
    options = BroadcastOptions()
    options.rootRank = root
    return _PythonWork(group.broadcast([flat], options))


def all_gather(group: dist.ProcessGroup, out: torch.Tensor, part: torch.Tensor) -> Work:
    outs = list(out.view(group.size(), -1).unbind())
    return _PythonWork(group.allgather([outs], [part.reshape(-1)], AllgatherOptions()))


class _PythonWork:
    """A work object written in Python, of which only a `wait` with a timeout is known."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._complete = False

    def done(self) -> bool:
        return self._complete

    def wait(self, seconds: float) -> bool:
        if not self._complete:
            self._complete = self._wait_raw(seconds)
        return self._complete

    def _wait_raw(self, seconds: float) -> bool:
        try:
            return bool(self._raw.wait(timedelta(seconds=max(seconds, 0.001))))  # gloo takes 0 ms for "no limit"
        except TypeError:  # it need not take a timeout
            return bool(self._raw.wait())
        except RuntimeError as error:
            if "timed out" in str(error).lower():  # of gloo, which it may wrap: the slice is over, nothing else
                return False
            if "not implemented" not in str(error):
                raise
            return FutureWork(self._raw.get_future()).wait(seconds)  # a work made from a future takes no timeout


class _DividedWork:
    """A sum that is divided once it is complete."""

    def __init__(self, work: Work, flat: torch.Tensor, divide_by: int) -> None:
        self._work = work
        self._flat = flat
        self._divide_by = divide_by
        self._complete = False

    def done(self) -> bool:
        return self._work.done()

    def wait(self, seconds: float) -> bool:
        if not self._complete and self._work.wait(seconds):
            with torch.no_grad():
                self._flat.div_(self._divide_by)
            self._complete = True
        return self._complete
