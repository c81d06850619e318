"""Which backward is under way, whether it still is, and who else takes part in it."""

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.progress import Phase, own_progress
from paceline.reducer import autograd

NO_TASK = -2  # no backward has this number, and -1 is no backward at all

TWO_THREADS = (
    "two threads have run a backward of one replica at the same time, so their gradients cannot be told apart; run "
    "them one after another, or add the losses and run one backward"
)


@dataclass(slots=True)
class Backward:
    """One backward under way."""

    task: int
    thread: int  # that it began on
    running: "weakref.ref[Callable[[], None]]"  # dead when the backward ended without its callback
    adds: bool | None  # whether it is a backward() and not an autograd.grad(), if that can be told
    syncs: bool
    alone: bool  # there is no one to reduce with: gradients stay where autograd put them
    delivered: bool = False  # some parameter got a gradient
    met_another: bool = False  # a second thread has run a backward of the same replica meanwhile

    @property
    def reduces(self) -> bool:
        """Whether the other ranks reduce with it."""
        return self.syncs and bool(self.delivered or self.adds)


class Backwards:
    """The one backward of a replica that may be under way."""

    def __init__(self, at_end: Callable[[], None], *, on_host: bool) -> None:
        """`on_host`: no gradient comes from a thread of the engine's own, which may be that of many backwards."""
        self._at_end = at_end
        self._on_host = on_host
        self.current: Backward | None = None
        self.counting = NO_TASK  # the number of the backward whose gradients only count: see `GradSlot.only_counts`

    def open(self, task: int, *, syncs: bool, alone: bool) -> Backward:
        autograd.refuse_fake_tensors()
        own_progress().note(Phase.BACKWARD)
        running = autograd.at_end_of_backward(self._at_end)
        self.current = Backward(task, threading.get_ident(), running, autograd.adds_to_grad(), syncs, alone)
        return self.current

    def found(self, task: int) -> Backward | None:
        """The one that `task` is, or is nested in. One that another thread has begun meanwhile is noted there."""
        current = self.current
        if current is None or (current.task != task and current.running() is None):
            return None
        if current.task != task:
            elsewhere = self._on_host and current.thread != threading.get_ident()
            current.met_another |= elsewhere or not autograd.is_nested()
        return current

    def running(self) -> bool:
        """Whether one is under way, and has not failed."""
        return self.current is not None and not self.failed()

    def failed(self) -> bool:
        """Whether it ended with an exception, so that its callback will never run."""
        return self.current is not None and self.current.running() is None

    def close(self) -> Backward | None:
        closed, self.current = self.current, None
        self.counting = NO_TASK
        if closed is not None:
            own_progress().note(Phase.BETWEEN)
        return closed


@dataclass(frozen=True, slots=True)
class Settlement:
    """The end of a backward, queued behind whatever else is called there."""

    running: "weakref.ref[Callable[[], None]]"  # dead when it was called, or never will be
    thread: int

    def is_own(self, lock: threading.RLock, is_due: Callable[[], bool]) -> bool:
        """Whether this thread is to come to it, and has begun another backward before. What another thread is about to
        receive is waited for, without the lock, as long as it is due."""
        while is_due() and self.running() is not None:
            if self.thread == threading.get_ident():
                return True
            lock.release()
            time.sleep(0.0005)
            lock.acquire()
        return False


class Unsettled(Protocol):
    """A reducer that has sent its gradients and has not received those of the others."""

    def progress(self) -> None: ...


class UnsettledReducers(threading.local):
    """The reducers that have sent and not received, of each thread: a thread may be a rank of its own.

    Why replicas of one backward send first and wait afterwards
    -----------------------------------------------------------
    When a loss goes through two replicas, autograd calls both reducers at its end, one after the other. Another rank
    may come to them in the other order, or have no use for one of them until its optimizer steps. If the first waited
    for its result before the second had sent, each rank could wait for what the other has not sent. So at the end of a
    backward every reducer sends, and queues its wait behind whatever else is called there. And while one waits, it lets
    the others make progress, where the waiting thread is the one that does their work. Nothing else may be sent then,
    such as what the planning of buckets needs: another rank could be waiting in another replica's.
    """

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Unsettled] = weakref.WeakSet()
        self._called: weakref.WeakSet[Unsettled] = weakref.WeakSet()

    def add(self, reducer: Unsettled) -> None:
        self._all.add(reducer)

    def discard(self, reducer: Unsettled) -> None:
        self._all.discard(reducer)

    def note_called(self, reducer: Unsettled) -> None:
        """A training forward of its replica was run, whose backward comes on this thread."""
        self._called.add(reducer)

    def called(self, reducer: Unsettled) -> list[Any]:
        """The others whose backward may be that of `reducer` too."""
        return [other for other in self._called if other is not reducer]

    def unsettled(self, reducer: Unsettled) -> list[Any]:
        """The others that have sent and not received."""
        return [other for other in self._all if other is not reducer]

    def of(self, reducer: Unsettled) -> Callable[[], None] | None:
        """What to do while `reducer` waits. None: nothing."""
        others = self.unsettled(reducer)
        if not others:
            return None

        def progress() -> None:
            for other in others:
                other.progress()

        return progress


unsettled_reducers = UnsettledReducers()
