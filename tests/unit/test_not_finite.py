"""Who spoilt a sum: of copies that one rank sees, and of numbers that it sends to ranks it does not see."""

import itertools

import pytest
import torch

from paceline.collectives import finite
from paceline.collectives.api import Op
from paceline.collectives.finite import Sent, all_finite, numbers_of
from paceline.collectives.shm.plan import PIECE, Scratch, Summing

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]


def copies_of(count: int, dtype: torch.dtype, numel: int = 100) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(count)
    return list(torch.randn(count, numel, generator=draws).to(dtype))


def summing(copies: list[torch.Tensor], op: Op) -> Summing:
    return Summing(copies, op, (0, copies[0].numel()), len(copies), Scratch())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("op", [Op.SUM, Op.MEAN, Op.TREE])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_copy_that_spoils_a_sum_is_found_though_sums_overwrite_copies(dtype: torch.dtype, op: Op) -> None:
    for count in (1, 2, 3, 4, 5, 8):
        clean = copies_of(count, dtype)
        for bad in itertools.chain.from_iterable(itertools.combinations(range(count), k) for k in (0, 1, 2, count)):
            for value in (INF, NAN):
                looked, plain = ([copy.clone() for copy in clean] for _ in range(2))
                for place in bad:
                    looked[place][7] = plain[place][7] = value
                found: set[int] = set()
                summing(looked, op).run(found)
                summing(plain, op).run()
                assert found == set(bad), (count, value)
                assert all(same_bits(one, other) for one, other in zip(looked, plain, strict=True)), (
                    "looking changes no bit"
                )


def test_an_overflow_is_by_all_and_integers_are_not_looked_at() -> None:
    for dtype, op in itertools.product((torch.float16, torch.float32), (Op.SUM, Op.TREE)):
        copies = [torch.full((10,), 0.6 * torch.finfo(dtype).max, dtype=dtype) for _ in range(3)]
        found: set[int] = set()
        summing(copies, op).run(found)
        assert found == {0, 1, 2}
    found = set()
    summing([torch.full((10,), 60000, dtype=torch.float16) for _ in range(3)], Op.MEAN).run(found)
    summing([torch.full((10,), -1, dtype=torch.int32) for _ in range(2)], Op.SUM).run(found)
    summing([torch.full((10,), INF) for _ in range(2)], Op.MAX).run(found)
    assert found == set()


def test_each_piece_has_its_own_culprits() -> None:
    numel = 3 * PIECE // 4 + 5
    copies = copies_of(3, torch.float32, numel)
    copies[0][0], copies[2][-1] = NAN, INF
    found: set[int] = set()
    summing(copies, Op.MEAN).run(found)
    assert found == {0, 2}


def test_between_hosts_the_sum_of_this_one_is_told_apart_from_that_of_all() -> None:
    copies = copies_of(2, torch.float32)
    found: set[int] = set()
    prepared = summing(copies, Op.SUM)
    assert prepared.sum() is None
    assert prepared.sum(found) is True
    prepared.result[3] = INF  # what the other hosts have made of it
    prepared.spread()
    assert found == set()
    prepared.spread(found)
    assert found == {0, 1}
    found.clear()
    copies[1][3] = NAN
    copies[0][3] = 0
    assert summing(copies, Op.SUM).sum(found) is False
    assert found == {1}


def turned_on() -> Sent:
    sent = Sent()
    sent.turn(True)
    return sent


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rank_finds_what_it_sends_itself(dtype: torch.dtype) -> None:
    sent, flat = turned_on(), copies_of(1, dtype)[0]
    assert sent.look(flat, 8) is None
    assert not sent.taken()
    for value in (NAN, INF, -INF):
        spoilt = flat.clone()
        spoilt[-1] = value
        assert not all_finite(spoilt)
        sent.look(spoilt, 8)
        sent.look(flat, 8)
        assert sent.taken()
        assert not sent.taken()
        sent.look(spoilt, 8)
        sent.turn(False)
        sent.turn(True)
        assert not sent.taken(), "what was found is forgotten"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_only_large_numbers_are_to_blame_for_a_sum_that_is_not_finite(dtype: torch.dtype) -> None:
    sent, large = turned_on(), torch.full((5,), 0.6 * torch.finfo(dtype).max, dtype=dtype)
    for result, blamed in ((large, False), (large * 2, True), (large * NAN, True)):
        look = sent.look(large, 2)
        assert look is not None
        look.at_result(result)
        assert sent.taken() is blamed
    innocent = sent.look(torch.full((5,), 0.2 * torch.finfo(dtype).max, dtype=dtype), 2)
    assert innocent is not None, "its squares overflow"
    innocent.at_result(large * NAN)
    assert not sent.taken()


def test_looks_that_nobody_asks_for_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finite, "MANY", 8)
    sent = turned_on()
    for number in range(30):
        sent.look(torch.tensor([NAN if number == 0 else 3e38]))
    assert len(sent._looks) <= 8
    assert sent.taken()
    assert not sent.taken()


def test_numbers_of_all_kinds_of_tensors() -> None:
    assert numbers_of(torch.ones(3, dtype=torch.int64)) is None
    assert numbers_of(torch.ones(0)) is None
    assert numbers_of(torch.ones(2, 3, requires_grad=True).t()).shape == (6,)  # type: ignore[union-attr]
    assert not all_finite(torch.tensor([complex(1, NAN)]).conj())
    assert not all_finite(torch.tensor(INF))
    assert not all_finite(torch.tensor([[0.0, NAN]]).to_sparse())
    assert not all_finite(torch.tensor([1.0, NAN]).to(torch.float8_e5m2))
    assert all_finite(torch.full((1000,), 3e38)), "though their sum is not"
