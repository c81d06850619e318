"""A replica that has drifted is found, named and healed."""

import random
from collections.abc import Callable

import pytest
import torch

from paceline.agree.drift import Drift, heal, locate
from paceline.agree.state_digest import Piece, Rotation, state_digest
from paceline.collectives import Transport
from paceline.collectives.group import Group
from paceline.collectives.threads import run
from paceline.errors import NoMajority, ReplicaDrift, UsageError

Named = list[tuple[str, torch.Tensor]]


def state() -> Named:
    make = torch.Generator().manual_seed(3)
    return [
        ("w", torch.randn(130, 70, generator=make)),
        ("half", torch.randn(33, generator=make).bfloat16()),
        ("last", torch.randn(2, 8, 3, 3, generator=make).to(memory_format=torch.channels_last)),
        ("counts", torch.arange(5)),
        ("mask", torch.tensor([True, False, True])),
        ("z", torch.randn(6, dtype=torch.complex64, generator=make)),
        ("step", torch.tensor(4.0)),
        ("none", torch.empty(0, 3)),
    ]


def flip(tensor: torch.Tensor, index: tuple[int, ...], bit: int) -> None:
    """Change one bit of one element, whatever the strides."""
    one = tensor[index].clone().view(1)
    one.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    tensor.view(raw)[index] = one.view(raw)[0]


def digest(pieces: list[Piece]) -> int:
    return state_digest([piece.flat() for piece in pieces])


def search(size: int, damage: Callable[[int, dict[str, torch.Tensor]], None]) -> list[Drift]:
    def body(transport: Transport) -> Drift:
        named = state()
        damage(transport.rank, dict(named))
        return locate(Rotation(named, 8).whole(), Group(transport), step=12)

    return run(body, size)


# --------------------------------------------------------------------------------------------------------------- names


def test_the_odd_rank_the_tensor_the_element_and_the_bit_are_named() -> None:
    def damage(rank: int, named: dict[str, torch.Tensor]) -> None:
        named["w"][97, 33] = 1.0
        if rank == 1:
            flip(named["w"], (97, 33), 31)

    for drift in search(3, damage):
        assert drift.ranks == (1,)
        assert drift.healable
        assert drift.element is not None
        assert drift.element.index == (97, 33)
        error = drift.error()
        assert (error.ranks, error.tensor, error.step) == ((1,), "w", 12)
        assert str(error) == (
            "replicas have drifted apart at step 12: rank 1 differs from ranks 0 and 2 in w. The first difference is "
            "element [97, 33]: 1.0 (0x3f800000) on ranks 0 and 2, -1.0 (0xbf800000) on rank 1; bit 31 differs. Heal "
            "rank 1 from the majority, or restart from a checkpoint; if it happens there again, suspect the memory or "
            "the processor of that machine"
        )


def test_two_ranks_cannot_outvote_each_other() -> None:
    def damage(rank: int, named: dict[str, torch.Tensor]) -> None:
        if rank == 0:
            named["step"].fill_(5)

    for drift in search(2, damage):
        assert drift.ranks == (0, 1)
        assert not drift.healable
        text = str(drift.error())
        assert "at step 12: ranks 0 and 1 differ in step. Its value is 5.0 (0x40a00000) on rank 0, 4.0" in text
        assert "No majority says which values are right" in text


def test_groups_are_told() -> None:
    def halves(rank: int, named: dict[str, torch.Tensor]) -> None:
        named["counts"][3] = rank // 2

    def all_different(rank: int, named: dict[str, torch.Tensor]) -> None:
        named["counts"][3] = rank

    def two_odd(rank: int, named: dict[str, torch.Tensor]) -> None:
        named["counts"][3] = max(0, rank - 2)

    text = search(4, halves)[0].text
    assert "step 12: ranks fall into 2 groups (ranks 0 and 1; ranks 2 and 3) that differ in counts" in text
    assert "all 3 ranks differ in counts" in search(3, all_different)[1].text
    drift = search(5, two_odd)[4]
    assert drift.ranks == (3, 4)
    assert "ranks 3 and 4 differ, each in its own way, from ranks 0, 1 and 2 in counts" in drift.text


def test_several_tensors_of_several_ranks() -> None:
    def damage(rank: int, named: dict[str, torch.Tensor]) -> None:
        if rank == 1:
            named["half"][32] = 7
        if rank == 4:
            named["mask"][1] = True
            named["z"][5].fill_(1j)

    drift = search(5, damage)[0]
    assert [(one.name, one.odd) for one in drift.tensors] == [("half", (1,)), ("mask", (4,)), ("z", (4,))]
    assert drift.ranks == (1, 4)
    assert "3 of 8 tensors differ, also mask, z, on ranks 1 and 4" in drift.text


def test_equal_replicas_have_no_drift() -> None:
    def nothing(rank: int, named: dict[str, torch.Tensor]) -> None:
        """All stay as they are."""

    drift = search(3, nothing)[0]
    assert (drift.compared, drift.tensors, drift.ranks, drift.element) == (8, (), (), None)


def test_ranks_with_different_state_are_told_so() -> None:
    def body(transport: Transport) -> None:
        named = state()
        if transport.rank == 2:
            named.insert(1, ("exp_avg of w", torch.zeros(4)))
        locate(Rotation(named, 1).whole(), Group(transport), step=9)

    with pytest.raises(ReplicaDrift, match="where ranks 0 and 1 have half .* rank 2 has exp_avg of w") as caught:
        run(body, 3)
    assert caught.value.ranks == (2,)


# ------------------------------------------------------------------------------------------------------------- healing


@pytest.mark.parametrize("size", [3, 5])
def test_every_flip_is_found_within_the_rotation_and_healed(size: int) -> None:
    every, flips = 4, 12

    def body(transport: Transport) -> int:
        named, expected = state(), dict(state())
        rotation = Rotation(named, every)
        draw = random.Random(size)
        found = 0
        for _ in range(flips):
            name, tensor = draw.choice([pair for pair in named if pair[1].numel()])
            victim = draw.randrange(size)
            index = tuple(draw.randrange(length) for length in tensor.shape)
            bit = 0 if tensor.dtype is torch.bool else draw.randrange(8 * tensor.itemsize)
            if transport.rank == victim and tensor.dtype is torch.complex64:
                flip(torch.view_as_real(tensor), (*index, bit // 32), bit % 32)
            elif transport.rank == victim:
                flip(tensor, index, bit)
            for step in range(every):
                pieces = rotation.part(step)
                drift = locate(pieces, Group(transport), step=step)
                if drift.tensors:
                    assert [one.name for one in drift.tensors] == [name]
                    assert drift.ranks == (victim,)
                    assert drift.element is not None
                    assert drift.element.index == index
                    assert drift.element.bits[victim] ^ drift.element.bits[victim - 1] == 1 << bit
                    assert heal(drift, pieces, Group(transport)) == [name]
                    found += 1
            assert digest(rotation.whole()) == state_digest(list(expected.values()))
        for name, tensor in named:
            assert tensor.stride() == expected[name].stride()
        return found

    assert run(body, size) == [flips] * size


def test_without_a_majority_healing_needs_someone_to_trust() -> None:
    def body(transport: Transport) -> list[int]:
        named = state()
        if transport.rank == 1:
            dict(named)["counts"][0] = 17
        pieces = Rotation(named, 1).whole()
        before = digest(pieces)
        drift = locate(pieces, Group(transport), step=3)
        with pytest.raises(NoMajority, match="counts cannot be healed at step 3: ranks 0 and 1 differ, and two ranks"):
            heal(drift, pieces, Group(transport))
        assert digest(pieces) == before
        with pytest.raises(UsageError, match="0 to 1, got 2"):
            heal(drift, pieces, Group(transport), trust=2)
        heal(drift, pieces, Group(transport), trust=1)
        return [digest(pieces), int(dict(named)["counts"][0])]

    first, second = run(body, 2)
    assert first == second
    assert first[1] == 17
