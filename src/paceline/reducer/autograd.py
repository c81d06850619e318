"""The only user of private autograd calls, so that a change in torch is a change in one small file."""

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import Variable

# The number of the backward this thread runs, -1 outside. A nested backward has a number of its own. Asked for every
# gradient, so it is not wrapped in a function of ours.
task_id: Callable[[], int] = torch._C._current_graph_task_id


def at_end_of_backward(callback: Callable[[], None]) -> "weakref.ref[Callable[[], None]]":
    """Run `callback` when the current backward has produced its last gradient.

    Returns a weak reference that dies with the backward: the engine holds the only strong one, so a backward that
    ended with an exception, whose callbacks never run, can be told from one that still runs.
    """

    def at_end() -> None:
        callback()

    Variable._execution_engine.queue_callback(at_end)
    return weakref.ref(at_end)


def hook_owners(param: torch.Tensor) -> Iterator[Any]:
    """The objects whose methods are hooked to `param`, oldest first; None for hooks that are plain functions."""
    for hook in list((param._post_accumulate_grad_hooks or {}).values()):
        yield getattr(hook, "__self__", None)


def adds_to_grad() -> bool | None:
    """Whether the backward this thread runs was started by `backward()`, and not by `autograd.grad()`.

    None when it cannot be told: on a GPU, gradients come on threads of the engine's own.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.autograd.backward.__code__:
            return True
        if frame.f_code is torch.autograd.grad.__code__:
            return False
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
