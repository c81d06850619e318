"""torch's `mixed_precision=` argument: compute in a narrow type, keep parameters and gradients wide.

The narrow copies stand in for the parameters from forward to the end of backward. Gradients come narrow and are added
into wide buckets; `reduce_dtype` sets the type in which they are sent.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.collectives.reduction import Mean
from paceline.collectives.reduction_protocol import Reduction
from paceline.strategies.cast import Wire


def reduction_for(config: Any, params: tuple[nn.Parameter, ...]) -> Reduction:
    """torch's rule: reduce in `reduce_dtype`, else in `param_dtype`, else in the parameters' own type."""
    dtype = config.reduce_dtype or config.param_dtype
    return Mean() if dtype is None or all(p.dtype == dtype for p in params) else Wire(dtype)


class NarrowParameters:
    """Swaps the parameters of one module for narrow copies and back."""

    def __init__(self, params: list[nn.Parameter], dtype: torch.dtype | None) -> None:
        self._params = params
        self._dtype = dtype
        self._wide: list[torch.Tensor] | None = None

    def wide(self) -> list[torch.Tensor]:
        """The parameters themselves, even while narrow copies stand in for them."""
        return [p.data for p in self._params] if self._wide is None else self._wide

    def narrow(self) -> None:
        """Before forward. Does nothing while the narrow copies are in place already."""
        if self._wide is None and self._dtype is not None:
            self._wide = [p.data for p in self._params]
            for param in self._params:
                if param.is_floating_point():
                    param.data = param.data.to(self._dtype)

    def widen_before_state_is_read(self, module: nn.Module) -> list[RemovableHandle]:
        """A forward may have had no backward: make sure that the wide parameters are saved or loaded."""
        return [
            module.register_state_dict_pre_hook(self._before_state),
            module.register_load_state_dict_pre_hook(self._before_state),
        ]

    def _before_state(self, *_: Any) -> None:
        self.widen()

    def widen(self) -> None:
        """After the last gradient, or when no backward will follow."""
        if self._wide is not None:
            for param, wide in zip(self._params, self._wide, strict=True):
                param.data = wide
            self._wide = None


def cast_buffers(module: nn.Module, dtype: torch.dtype | None, ignored: set[str]) -> None:
    if dtype is not None:
        for name, buffer in module.named_buffers():
            if name not in ignored and buffer.is_floating_point():
                buffer.data = buffer.to(dtype)
