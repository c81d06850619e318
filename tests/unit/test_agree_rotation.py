"""Which part of the state is compared when."""

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.agree.drift import element_index, overwrite
from paceline.agree.state_digest import Piece, Rotation, StateReplaced, state_digest
from paceline.agree.state_parts import ALIGN_BYTES, cut, optimizer_tensors
from paceline.errors import UsageError


@given(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([1, 2, 4, 8, 16])), max_size=12), st.integers(1, 40))
def test_every_element_is_in_one_part_and_parts_are_of_equal_size(metadata: list[tuple[int, int]], every: int) -> None:
    parts = cut(metadata, every)
    assert len(parts) == every
    at = [0] * len(metadata)
    for part in parts:
        for index, begin, end in part:
            assert begin == at[index] < end
            assert begin * metadata[index][1] % ALIGN_BYTES == 0
            at[index] = end
    assert at == [numel for numel, _ in metadata]
    total = sum(numel * itemsize for numel, itemsize in metadata)
    for part in parts:
        size = sum((end - begin) * metadata[index][1] for index, begin, end in part)
        assert abs(size - total / every) <= ALIGN_BYTES + 1


def test_parts_turn_with_the_step_and_1_is_everything() -> None:
    named = [("w", torch.zeros(64, 64)), ("b", torch.zeros(3)), ("n", torch.tensor(0)), ("empty", torch.empty(0))]
    rotation = Rotation(named, 4)
    sizes = [sum(piece.numel * piece.tensor.itemsize for piece in rotation.part(step)) for step in range(8)]
    assert sizes[:4] == sizes[4:]
    assert sum(sizes[:4]) == sum(tensor.nbytes for _, tensor in named)
    assert [(p.name, p.numel) for p in Rotation(named, 1).part(17)] == [("w", 4096), ("b", 3), ("n", 1)]
    assert [p.name for p in rotation.whole()] == ["w", "b", "n", "empty"]
    assert rotation.part(0)[0].flat().data_ptr() == named[0][1].data_ptr()
    assert Rotation([], 3).part(5) == []


def test_state_that_comes_later_is_taken_and_tied_weights_are_taken_once() -> None:
    weight = torch.zeros(100)
    rotation = Rotation([("w", weight), ("tied", weight), ("sparse", torch.eye(2).to_sparse())], 2)
    assert [(piece.name, piece.numel) for piece in rotation.whole()] == [("w", 100)]
    rotation.renew([("w", weight), ("exp_avg of w", torch.zeros(100)), ("step", torch.tensor(1.0))])
    assert [piece.numel for piece in rotation.whole()] == [100, 100, 1]
    fresh = torch.ones(100)
    rotation.renew([("w", fresh), ("exp_avg of w", torch.zeros(100)), ("step", torch.tensor(1.0))])
    assert rotation.part(0)[0].tensor is fresh


def test_what_stands_in_a_place_is_followed_until_it_is_something_else() -> None:
    place: dict[str, Any] = {"moment": torch.zeros(100)}
    rotation = Rotation([("w", torch.zeros(100)), ("moment", lambda _: place.get("moment"))], 1)
    fresh = place["moment"] = torch.ones(100)
    assert [piece.tensor is fresh for piece in rotation.part(0)] == [False, True]
    for other in (torch.ones(99), torch.ones(100, dtype=torch.float64), None):
        place["moment"] = other
        with pytest.raises(StateReplaced, match="moment"):
            rotation.part(1)
        assert [piece.name for piece in rotation.whole()] == ["w"]


def test_places_in_an_optimizer_keep_nothing_of_it_alive() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param, nn.Parameter(torch.ones(3))], lr=0.1)
    state = optimizer.state[param] = {"d": torch.ones(3), "old": [torch.ones(3)], "steps": 3}
    located = dict(optimizer_tensors(weakref.ref(optimizer), {id(param): "w"}))
    assert list(located) == ["d of w", "old.0 of w"]
    assert located["d of w"](True) is state["d"]
    assert located["old.0 of w"](False) is state["old"][0]
    state["old"].clear()
    assert located["old.0 of w"](False) is None
    ref = weakref.ref(state["d"])
    del optimizer, state
    assert ref() is None
    assert located["d of w"](True) is None


@pytest.mark.parametrize("every", [0, -1, 1.5, True, None])
def test_a_wrong_number_is_refused(every: object) -> None:
    with pytest.raises(UsageError, match="every: expected the number of steps"):
        Rotation([], every)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.complex128])
def test_pieces_are_counted_in_rows_whatever_the_strides(dtype: torch.dtype) -> None:
    plain = torch.arange(4 * 5 * 6).view(4, 5, 6).to(dtype)
    strided = plain.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not strided.is_contiguous()
    for begin, end in ((0, 120), (7, 8), (29, 61), (119, 120), (30, 30)):
        ours, theirs = Piece("x", plain, begin, end), Piece("x", strided, begin, end)
        assert torch.equal(ours.flat(), theirs.flat())
        assert state_digest([ours.flat()]) == state_digest([theirs.flat()])
        source = Piece("x", torch.zeros_like(plain), begin, end)
        target = strided.clone()
        overwrite(Piece("x", target, begin, end), source.flat())
        expected = plain.clone()
        expected.view(-1)[begin:end] = 0
        assert torch.equal(target, expected)
        assert target.stride() == strided.stride()
    assert element_index(Piece("x", plain, 29, 61), 2) == (1, 0, 1)
    assert element_index(Piece("x", torch.tensor(1.0), 0, 1), 0) == ()


def test_writing_keeps_the_bits_of_a_nan() -> None:
    odd = torch.tensor([0x7FA00001, 0x7F800001], dtype=torch.int32).view(torch.float32)
    target = torch.zeros(4, 2)
    overwrite(Piece("x", target, 2, 4), odd)
    assert target.view(torch.int32)[1].tolist() == [0x7FA00001, 0x7F800001]
    strided = torch.zeros(2, 4).t()
    overwrite(Piece("x", strided, 2, 4), odd)
    assert strided.contiguous().view(torch.int32)[1].tolist() == [0x7FA00001, 0x7F800001]
