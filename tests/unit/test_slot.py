"""Which parameters have a gradient that is something."""

import math

import pytest
import torch

from paceline.layout import ParamMeta
from paceline.reducer.bucket import GradSlot
from paceline.reducer.unreduced import first_nonzero


def slot(index: int, grad: torch.Tensor | None) -> GradSlot:
    param = torch.nn.Parameter(torch.zeros(2, dtype=torch.float32 if grad is None else grad.dtype))
    if grad is not None:
        param = torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
        param.grad = grad
    meta = ParamMeta(f"p{index}", tuple(param.shape), tuple(param.stride()), param.dtype, param.device, sparse=False)
    return GradSlot(index, meta, param)


NOTHING = [None, torch.zeros(3), torch.zeros(2, 2, dtype=torch.bfloat16), torch.zeros(0), torch.zeros(4).to_sparse()]


@pytest.mark.parametrize(
    "grad",
    [
        torch.tensor([0.0, 1e-45]),
        torch.tensor([math.nan]),
        torch.tensor([0.0, -math.inf]),
        torch.tensor([0.0, 1e-40], dtype=torch.bfloat16),
        torch.tensor([0j, 1e-30j]),
        torch.tensor([0.0, 1.0]).to_sparse(),
    ],
)
def test_the_first_that_is_not_zero(grad: torch.Tensor) -> None:
    slots = [slot(index, one) for index, one in enumerate([*NOTHING, grad, torch.ones(2).to_sparse(), torch.ones(1)])]
    found = first_nonzero(slots)
    assert found is not None
    assert found.meta.name == f"p{len(NOTHING)}"


def test_zeros_are_nothing() -> None:
    assert first_nonzero([slot(index, one) for index, one in enumerate(NOTHING)]) is None
    assert first_nonzero([]) is None
