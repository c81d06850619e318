"""The only user of private autograd calls, so that a change in torch is a change in one small file."""

import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.autograd import Variable

from paceline.errors import UsageError

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


def hook_owners(param: torch.Tensor) -> Iterator[Any]:
    """The objects whose methods are hooked to `param`, oldest first; None for hooks that are plain functions."""
    for hook in list((param._post_accumulate_grad_hooks or {}).values()):
        yield getattr(hook, "__self__", None)


# A dict that goes with the contents of a tensor when `torch.utils.swap_tensors` gives it those of another. Who keeps it
# can tell later whether that was done. A weak reference would not do: tensors that have one are refused there.
mark_of_contents: Callable[[torch.Tensor], dict[str, Any]] = operator.attrgetter("__dict__")


def install_hooks(param: torch.Tensor) -> Sized:
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
