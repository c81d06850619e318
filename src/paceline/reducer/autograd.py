"""What is registered with autograd: the hooks of a replica on parameters and outputs, and the end of a backward.

The only user of private autograd calls, so that a change in torch is a change in one file.
"""

import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sized
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from paceline.errors import UsageError
from paceline.reducer import shared_params

if TYPE_CHECKING:
    from paceline.reducer.bucket import GradSlot
    from paceline.reducer.reducer import Reducer

# The number of the backward this thread runs, -1 outside. A nested backward has a number of its own. Asked for every
# gradient, so it is not wrapped in a function of ours.
task_id: Callable[[], int] = torch._C._current_graph_task_id

# The current stream of a device as a number. Asked for every gradient on a device.
raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: -1)


def refuse_compiled_autograd() -> None:
    """Compiled autograd calls hooks, but not what they want to have done at the end of a backward."""
    # Where it was not imported, or another thread is about to, no one has chosen it.
    mode = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(mode, "compiled_autograd_enabled", False) or getattr(mode, "in_compiled_autograd_region", False):
        raise UsageError(
            "gradients cannot be reduced under compiled autograd; switch it off, or set "
            'torch._dynamo.config.optimize_ddp = "python_reducer" before wrapping'
        )


def refuse_fake_tensors() -> None:
    """Memory that was made while tensors are faked would be of no use afterwards."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    if module is not None and torch._C._len_torch_dispatch_stack():
        stack = (torch._C._get_dispatch_stack_at(at) for at in range(torch._C._len_torch_dispatch_stack()))
        if any(isinstance(mode, module.FakeTensorMode) for mode in stack):
            raise UsageError("gradients cannot be reduced under FakeTensorMode; run backward outside of it")


def at_end_of_backward(callback: Callable[[], None]) -> "weakref.ref[Callable[[], None]]":
    """Run `callback` when the current backward has produced its last gradient.

    Returns a weak reference that dies with the backward: the engine holds the only strong one, so a backward that
    ended with an exception, whose callbacks never run, can be told from one that still runs.
    """

    refuse_compiled_autograd()

    def at_end() -> None:
        callback()

    Variable._execution_engine.queue_callback(at_end)
    return weakref.ref(at_end)


# A dict that goes with the contents of a tensor when `torch.utils.swap_tensors` gives it those of another. Who keeps it
# can tell later whether that was done. A weak reference would not do: tensors that have one are refused there.
_mark_of_contents: Callable[[torch.Tensor], dict[str, Any]] = operator.attrgetter("__dict__")


def _install_hooks(param: torch.Tensor) -> Sized:
    """Have autograd run the hooks that are registered: it forgets them when the contents are swapped, and the dict that
    lists them is not told. Returns that dict."""
    param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
    return param._post_accumulate_grad_hooks


def adds_to_grad() -> bool | None:
    """Whether the backward this thread runs was started by `backward()`, and not by `autograd.grad()`.

    None when it cannot be told: on a GPU, gradients come on threads of the engine's own.
    """
    return next(_started_by(), None)


def is_nested() -> bool:
    """Whether the backward that runs here was started inside another one that waits for it, as reentrant checkpointing
    does, and not by another thread.

    On a thread of Python's own the outer backward stands on the stack too. A thread of the engine's own, which runs
    what is on a GPU, has no Python below the node that it runs: there only a nested backward stands on the stack.
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


class ParamHooks:
    """The hooks of one replica on its parameters, and on the outputs of its forward."""

    def __init__(self, owner: "Reducer") -> None:
        self._owner = owner
        self._slots = owner.bucket_set.slots
        self._params = [slot.param for slot in self._slots]
        self._handles: list[RemovableHandle] = []
        self._marks: list[dict[str, object]] = []  # see _mark_of_contents
        self._closed = False

    def register(self) -> None:
        """Hook every parameter. Nothing is done when they are hooked already, nor after `close`."""
        if not self._handles and not self._closed:
            hook = self._owner.on_grad_ready
            self._handles = [param.register_post_accumulate_grad_hook(hook) for param in self._params]
            self._install()
            shared_params.claim(self._owner)

    def watch_output(self, output: torch.Tensor) -> None:
        """Have the backward that goes through `output` end with a reduction, also when its gradients all come from
        nested backwards, or when it touches no parameter."""
        hook = self._owner.on_output_backward
        if hook not in (output._backward_hooks or {}).values():  # a module may return its input
            output.register_hook(hook)

    def follow_swaps(self, *, takes_over: bool) -> None:
        """Hook parameters again that were given other contents, as `torch.utils.swap_tensors` does: the hooks have
        gone with the contents before. `takes_over`: parameters that other replicas hold too are this one's from now
        on. Asked in every forward, so it costs little."""
        if not all(map(operator.is_, map(_mark_of_contents, self._params), self._marks)):
            self._install()
        if takes_over and any(slot.owned_elsewhere for slot in self._slots):
            shared_params.claim(self._owner)

    def _install(self) -> None:
        for slot in self._slots:
            slot.hooks = _install_hooks(slot.param)
        self._marks = [_mark_of_contents(param) for param in self._params]

    def __bool__(self) -> bool:
        """Whether the parameters are hooked."""
        return bool(self._handles)

    def runs_last(self, slot: "GradSlot") -> bool:
        """Whether our hook runs after all hooks of the user's, so that these see the gradient and may change it.

        If not, it is moved behind them, for the next backward.
        """
        if list(shared_params.hook_owners(slot.param))[-1] is self._owner:
            return True
        self._handles[slot.index].remove()
        self._handles[slot.index] = slot.param.register_post_accumulate_grad_hook(self._owner.on_grad_ready)
        return False

    def close(self) -> None:
        """Remove every hook, and leave shared parameters to the replica that was made last before this one."""
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
