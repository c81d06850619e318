"""A parameter whose values are still being gathered: any use from Python waits for them first.

Note: how a use is detected
--------------------------
For every function call, torch checks whether the class of an argument defines `__torch_function__`. So while values are
being gathered the parameter has another class, whose handler waits, restores the original class and then runs the
function. Nothing else about the parameter changes: its identity, memory, gradient and hooks stay the same. C++ code
that uses a parameter by itself, as in a ScriptModule or in a kernel that got it outside any module, cannot be detected:
see `update_gathers.py` for who waits instead.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn


class PendingParameter(nn.Parameter):
    """The class of a parameter until its values have arrived. Every gather has its own subclass, which knows how to
    wait."""

    # Waits for the values, and makes every parameter of the gather an nn.Parameter again.
    wait: ClassVar[Callable[[], None]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Creating a tensor of this type creates an ordinary parameter."""
        return nn.Parameter(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _needs_no_values():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        cls.wait()
        for used in args:
            if type(used) is cls:  # it has replaced a parameter of the gather, as torch.utils.swap_tensors does
                _restore(used)
        return func(*args, **kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._arrived().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._arrived().__reduce_ex__(protocol)

    def _arrived(self) -> Any:
        type(self).wait()
        _restore(self)
        return self


def _restore(param: Any) -> None:
    param.__class__ = nn.Parameter


@cache
def _needs_no_values() -> frozenset[Any]:
    """The functions that need no values: metadata of the parameter, and its gradient."""
    of_tensor: Any = torch.Tensor
    read = "shape dtype device layout ndim nbytes is_cuda is_cpu is_meta requires_grad is_leaf grad grad_fn"
    read += " _backward_hooks _post_accumulate_grad_hooks"
    found = {getattr(of_tensor, name).__get__ for name in read.split()}
    for name in ("grad", "requires_grad"):
        found.update((getattr(of_tensor, name).__set__, getattr(of_tensor, name).__delete__))
    asked = "size dim ndimension numel nelement stride element_size get_device is_floating_point requires_grad_"
    found.update(getattr(of_tensor, name) for name in asked.split())
    return frozenset(found | {of_tensor.register_hook, of_tensor.register_post_accumulate_grad_hook})


def pending_class(wait: Callable[[], None]) -> type[PendingParameter]:
    """The class of the parameters of one gather until `wait` has finished it."""
    return type(
        "PendingParameter", (PendingParameter,), {"wait": staticmethod(wait), "__doc__": PendingParameter.__doc__}
    )
