"""What is moved to another rank is there as it was here: values, strides, alignment."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from paceline.agree.exact_copy import ALIGNMENT, UnknownKind, pack_exactly, unpack_exactly
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


class Pair(NamedTuple):
    x: torch.Tensor
    y: Any


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    weight: float = 1.0


class Batch(UserDict[str, Any]):
    """As tokenizers return them."""

    kind = "tokens"


def test_objects_are_made_like_those_of_the_receiver() -> None:
    sent = [Pair(draw(0, 3), Sample(draw(1, 2), 0.5)), Batch(ids=draw(2, 4), length=4)]
    own = (Batch(ids=draw(5, 1)), [Pair(draw(6, 1), Sample(draw(7, 1)))])
    blob = torch.frombuffer(bytearray(pack_exactly(sent, "x")), dtype=torch.uint8)
    pair, batch = unpack_exactly(blob, CPU, like=own)
    assert isinstance(pair, Pair) and isinstance(pair.y, Sample) and isinstance(batch, Batch)
    assert torch.equal(pair.x, draw(0, 3)) and torch.equal(pair.y.x, draw(1, 2)) and pair.y.weight == 0.5
    assert dict(batch)["length"] == 4 and torch.equal(batch["ids"], draw(2, 4)) and batch.kind == "tokens"
    assert torch.equal(own[0]["ids"], draw(5, 1)), "the receiver's own is as it was"
    with pytest.raises(UnknownKind, match="Pair"):
        unpack_exactly(blob, CPU, like=[Batch()])


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(UsageError, match=r"the batch\.1 cannot be sent to another rank: .* got a builtins\.object"):
        pack_exactly([1, object()], "the batch")
