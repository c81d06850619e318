"""What is moved to another rank is there as it was here: values, strides, alignment."""

from typing import Any

import pytest
import torch

from paceline.agree.exact_copy import ALIGNMENT, pack_exactly, unpack_exactly
from paceline.errors import UsageError
from tests.models import draw

CPU = torch.device("cpu")


def moved(value: Any) -> Any:
    return unpack_exactly(torch.frombuffer(bytearray(pack_exactly(value, "x")), dtype=torch.uint8), CPU)


def bits(tensor: torch.Tensor) -> list[int]:
    found: list[int] = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    return found


@pytest.mark.parametrize(
    "tensor",
    [
        draw(0, 3, 5),
        draw(0, 2, 3, 4, 5).to(memory_format=torch.channels_last),
        draw(0, 6, 5).t(),
        draw(0, 64)[3:],
        draw(0, 8, 9)[1:, 2:],
        draw(0, 7).to(torch.bfloat16)[1:],
        draw(0, 4, 4).to(torch.complex64),
        draw(0, 3, 1).expand(3, 4),
        torch.tensor(2.5),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.arange(9)[1:],
        torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32).view(torch.float32),
    ],
)
def test_a_tensor_keeps_its_bits_strides_and_alignment(tensor: torch.Tensor) -> None:
    (found,) = moved([tensor])
    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert bits(found) == bits(tensor)
    if tensor.numel() and 0 not in tensor.stride():
        assert found.stride() == tensor.stride()
        assert found.data_ptr() % ALIGNMENT == tensor.data_ptr() % ALIGNMENT


def test_values_around_tensors() -> None:
    shared = draw(1, 4)
    value = {"x": [shared, (1, 2.5, None)], "mask": shared, "text": "é", "leaf": draw(2, 3).requires_grad_()}
    found = moved(value)
    assert found["x"][1] == (1, 2.5, None)
    assert found["x"][0] is found["mask"]
    assert torch.equal(found["mask"], shared)
    assert found["text"] == "é"
    assert found["leaf"].requires_grad
    assert found["leaf"].is_leaf
    assert not found["mask"].requires_grad


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(UsageError, match=r"the batch\.1 cannot be sent to another rank: .* got a builtins\.object"):
        pack_exactly([1, object()], "the batch")
