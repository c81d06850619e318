"""A parameter whose values are still on their way: whoever uses it from Python waits for them first.

Note: how a use is noticed
--------------------------
torch asks the class of every tensor that a function is called with whether it has `__torch_function__`. So for as long
as values are on their way the parameter is of another class, and what is asked of it then waits, gives the parameter
its class back and is done as ever. Nothing else about it changes: not its identity, its memory, its gradient or its
hooks. What cannot be noticed is what C++ does with a parameter by itself, as in a ScriptModule or in a kernel that was
handed it outside of any module: see `update_gathers.py` for who waits instead.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import nn


class PendingParameter(nn.Parameter):
    """What a parameter is until its values are there. Every gather has a class of its own, which knows how to wait."""

    # Waits for the values, and has every parameter of the gather be an nn.Parameter again.
    wait: ClassVar[Callable[[], None]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Who makes a tensor like this one, by its type, makes a parameter."""
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
            if (
                type(used) is cls
            ):  # it has taken the place of a parameter of the gather, as torch.utils.swap_tensors does
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
    """What may be asked of a parameter whose values are not there: what it is like, and about its gradient."""
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
    """What the parameters of one gather are until `wait` has waited for it."""
    return type(
        "PendingParameter", (PendingParameter,), {"wait": staticmethod(wait), "__doc__": PendingParameter.__doc__}
    )
