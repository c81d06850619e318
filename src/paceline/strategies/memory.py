"""Values that a reduction remembers per parameter from step to step."""

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class ParamMemory(Generic[T]):
    """One value per parameter, for as long as the parameter lives.

    Kept by parameter and not by bucket, so that a new layout loses nothing. A copy, such as that in a copied replica,
    starts empty, because it belongs to other parameters.
    """

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[torch.Tensor], T]] = {}

    def of(self, param: torch.Tensor, make: Callable[[], T]) -> T:
        """The value of `param`, made if there is none."""
        key = id(param)
        found = self._values.get(key)
        if found is None:
            values = self._values
            found = self._values[key] = (weakref.ref(param, lambda _: values.pop(key, None)), make())
        return found[1]

    def get(self, param: torch.Tensor) -> T | None:
        found = self._values.get(id(param))
        return None if found is None else found[1]

    def clear(self) -> None:
        self._values.clear()

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> tuple[type["ParamMemory[T]"], tuple[()]]:
        return type(self), ()


def clear_unless_finite(witness: torch.Tensor, *tensors: torch.Tensor) -> None:
    """Zero `tensors` if the number `witness` is not finite.

    A step with non-finite gradients is discarded by the check for them. If remembered, they would spoil every later
    one.
    """
    if witness.is_cpu:
        if not torch.isfinite(witness):
            for tensor in tensors:
                tensor.zero_()
        return
    for tensor in tensors:  # without making the host wait for the device
        tensor.masked_fill_(~torch.isfinite(witness), 0.0)
