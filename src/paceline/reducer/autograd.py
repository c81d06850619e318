"""The reducer's use of autograd: which backward runs, when it ends, which replicas take part in it, and the hooks
of a replica on its parameters and outputs.

The only user of private autograd calls, so that a change in torch is a change in one file.
"""

import operator
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from paceline.errors import UsageError
from paceline.progress import Phase, own_progress
from paceline.reducer import shared_params
from paceline.reducer.swapped_contents import install_hooks, mark_of_contents

if TYPE_CHECKING:
    from paceline.reducer.bucket import GradSlot
    from paceline.reducer.reducer import Reducer

# The number of the backward this thread runs, -1 outside. A nested backward has a number of its own. Called for every
# gradient, so it is not wrapped in another function.
task_id: Callable[[], int] = torch._C._current_graph_task_id

NO_TASK = -2  # no backward has this number; -1 means no backward


def refuse_compiled_autograd() -> None:
    """Compiled autograd calls hooks, but not the callbacks that they queue for the end of a backward."""
    # If it is not imported, or another thread is importing it, it is not in use.
    mode = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(mode, "compiled_autograd_enabled", False) or getattr(mode, "in_compiled_autograd_region", False):
        raise UsageError(
            "gradients cannot be reduced under compiled autograd; switch it off, or set "
            'torch._dynamo.config.optimize_ddp = "python_reducer" before wrapping'
        )


def refuse_fake_tensors() -> None:
    """Memory allocated under FakeTensorMode would be useless afterwards."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    if module is not None and torch._C._len_torch_dispatch_stack():
        stack = (torch._C._get_dispatch_stack_at(at) for at in range(torch._C._len_torch_dispatch_stack()))
        if any(isinstance(mode, module.FakeTensorMode) for mode in stack):
            raise UsageError("gradients cannot be reduced under FakeTensorMode; run backward outside it")


def at_end_of_backward(callback: Callable[[], None]) -> "weakref.ref[Callable[[], None]]":
    """Run `callback` when the current backward has produced its last gradient.

    Returns a weak reference that dies with the backward: the engine holds the only strong one, so a backward that
    ended with an exception, whose callbacks never run, can be distinguished from one that still runs.
    """

    refuse_compiled_autograd()

    def at_end() -> None:
        callback()

    Variable._execution_engine.queue_callback(at_end)
    return weakref.ref(at_end)


def adds_to_grad() -> bool | None:
    """Whether the backward this thread runs was started by `backward()`, and not by `autograd.grad()`.

    None if that is unknown: on a GPU, gradients come on threads of the engine's own.
    """
    return next(_started_by(), None)


def is_nested() -> bool:
    """Whether the backward that runs here was started inside another one that waits for it, as reentrant checkpointing
    does, and not by another thread.

    On a Python thread the outer backward is on the stack too. A thread of the autograd engine, which runs GPU work, has
    no Python below the node that it runs: there only a nested backward is on the stack.
    """
    own_thread = threading.get_ident() in threading._active  # type: ignore[attr-defined]
    return len(list(_started_by())) > own_thread


def _started_by() -> Iterator[bool]:
    """For the backwards on this thread's stack, the innermost one first: True for backward(), False for grad()."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.autograd.backward.__code__:
            yield True
        elif frame.f_code is torch.autograd.grad.__code__:
            yield False
        if frame.f_back is None:
            return
        frame = frame.f_back


@dataclass(slots=True)
class Backward:
    """One backward under way."""

    task: int
    thread: int  # on which it began
    running: "weakref.ref[Callable[[], None]]"  # dead when the backward ended without its callback
    adds: bool | None  # whether it is a backward() and not a grad(), if known
    syncs: bool
    alone: bool  # no other rank to reduce with: gradients stay where autograd put them
    delivered: bool = False  # some parameter got a gradient
    met_another: bool = False  # a second thread has run a backward of the same replica meanwhile

    @property
    def reduces(self) -> bool:
        """Whether the other ranks reduce with it."""
        return self.syncs and bool(self.delivered or self.adds)


class Backwards:
    """The one backward of a replica that may be under way."""

    def __init__(self, at_end: Callable[[], None], *, on_host: bool) -> None:
        """`on_host`: no gradient comes from an engine thread, which many backwards may share."""
        self._at_end = at_end
        self._on_host = on_host
        self.current: Backward | None = None
        self.counting = NO_TASK  # the backward whose gradients are only counted: see `GradSlot.only_counts`

    def open(self, task: int, *, syncs: bool, alone: bool) -> Backward:
        refuse_fake_tensors()
        own_progress().note(Phase.BACKWARD)
        running = at_end_of_backward(self._at_end)
        self.current = Backward(task, threading.get_ident(), running, adds_to_grad(), syncs, alone)
        return self.current

    def found(self, task: int) -> Backward | None:
        """The backward that is `task`, or contains it. One that another thread began meanwhile is noted in it."""
        current = self.current
        if current is None or (current.task != task and current.running() is None):
            return None
        if current.task != task:
            elsewhere = self._on_host and current.thread != threading.get_ident()
            current.met_another |= elsewhere or not is_nested()
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
class PendingReceive:
    """The end of a backward, queued behind all other callbacks there."""

    running: "weakref.ref[Callable[[], None]]"  # dead once it was called, or never will be
    thread: int

    def is_own(self, lock: threading.RLock, is_due: Callable[[], bool]) -> bool:
        """Whether this thread will run it, and has begun another backward before. A receive of another thread
        is waited for, without the lock, as long as it is due."""
        while is_due() and self.running() is not None:
            if self.thread == threading.get_ident():
                return True
            lock.release()
            time.sleep(0.0005)
            lock.acquire()
        return False


class PendingReducers(threading.local):
    """The reducers of each thread that have sent and not received; a thread may be a rank of its own.

    Why replicas of one backward send first and wait afterwards
    -----------------------------------------------------------
    When a loss goes through two replicas, autograd calls both reducers at its end, one after the other. Another rank
    may come to them in the other order, or not need one of them until its optimizer steps. If the first waited
    for its result before the second had sent, each rank could wait for what the other has not sent. So at the end of a
    backward every reducer sends, and queues its wait behind all other callbacks. And while one waits, it lets
    the others make progress, if the waiting thread does their work. Nothing else may be sent then, such as what the
    planning of buckets needs: another rank could be waiting in another replica's.
    """

    def __init__(self) -> None:
        self._all: weakref.WeakSet[Reducer] = weakref.WeakSet()
        self._called: weakref.WeakSet[Reducer] = weakref.WeakSet()

    def add(self, reducer: "Reducer") -> None:
        self._all.add(reducer)

    def discard(self, reducer: "Reducer") -> None:
        self._all.discard(reducer)

    def note_called(self, reducer: "Reducer") -> None:
        """A training forward of its replica was run, whose backward comes on this thread."""
        self._called.add(reducer)

    def called(self, reducer: "Reducer") -> "list[Reducer]":
        """The other reducers that may take part in the same backward as `reducer`."""
        return [other for other in self._called if other is not reducer]

    def others(self, reducer: "Reducer") -> "list[Reducer]":
        """The others that have sent and not received."""
        return [other for other in self._all if other is not reducer]

    def of(self, reducer: "Reducer") -> Callable[[], None] | None:
        """What to do while `reducer` waits. None: nothing."""
        others = self.others(reducer)
        if not others:
            return None

        def progress() -> None:
            for other in others:
                other.progress()

        return progress


pending_reducers = PendingReducers()


class ParamHooks:
    """The hooks of one replica on its parameters, and on the outputs of its forward."""

    def __init__(self, owner: "Reducer") -> None:
        self._owner = owner
        self._slots = owner.bucket_set.slots
        self._params = [slot.param for slot in self._slots]
        self._handles: list[RemovableHandle] = []
        self._marks: list[dict[str, object]] = []  # see swapped_contents.py
        self._closed = False

    def register(self) -> None:
        """Hook every parameter. Nothing is done when they are hooked already, nor after `close`."""
        if not self._handles and not self._closed:
            hook = self._owner.on_grad_ready
            self._handles = [param.register_post_accumulate_grad_hook(hook) for param in self._params]
            self._install()
            shared_params.claim(self._owner)

    def watch_output(self, output: torch.Tensor) -> None:
        """Make the backward through `output` end with a reduction, even if its gradients all come from nested
        backwards, or if it touches no parameter."""
        hook = self._owner.on_output_backward
        if hook not in (output._backward_hooks or {}).values():  # a module may return its input
            output.register_hook(hook)

    def follow_swaps(self, *, takes_over: bool) -> None:
        """Hook parameters again whose contents were replaced, as by `torch.utils.swap_tensors`: the hooks went with the
        old contents. `takes_over`: parameters that other replicas share are this one's from now on. Called in every
        forward, so it is cheap."""
        if not all(map(operator.is_, map(mark_of_contents, self._params), self._marks)):
            self._install()
        if takes_over and any(slot.owned_elsewhere for slot in self._slots):
            shared_params.claim(self._owner)

    def _install(self) -> None:
        for slot in self._slots:
            slot.hooks = install_hooks(slot.param)
        self._marks = [mark_of_contents(param) for param in self._params]

    def __bool__(self) -> bool:
        """Whether the parameters are hooked."""
        return bool(self._handles)

    def runs_last(self, slot: "GradSlot") -> bool:
        """Whether the reducer's hook runs after all user hooks, so that these see the gradient and may change it.

        If not, it is moved behind them, for the next backward.
        """
        if list(shared_params.hook_owners(slot.param))[-1] is self._owner:
            return True
        self._handles[slot.index].remove()
        self._handles[slot.index] = slot.param.register_post_accumulate_grad_hook(self._owner.on_grad_ready)
        return False

    def close(self) -> None:
        """Remove every hook, and leave shared parameters to the most recent other replica."""
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        shared_params.leave(self._owner)


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples, dictionaries and dataclasses."""
    return _find(output, set())


def _find(output: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
        return
    if isinstance(output, (list, tuple)):
        items = list(output)
    elif isinstance(output, dict):
        items = list(output.values())
    elif is_dataclass(output) and not isinstance(output, type):
        items = [getattr(output, field.name, None) for field in fields(output)]
    else:
        return
    if id(output) in seen:  # a container that holds itself
        return
    seen.add(id(output))
    for item in items:
        yield from _find(item, seen)
