"""Numbers that are not finite."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.agree.finite import OWN, SUM, FiniteCheck, all_finite, first_not_finite, numbers_of

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e5m2]


@given(
    st.integers(0, 300),
    st.sampled_from(DTYPES),
    st.lists(st.tuples(st.integers(0, 299), st.sampled_from(["nan", "inf", "-inf"])), max_size=3),
)
def test_what_is_not_finite_is_found_and_counted(
    numel: int, dtype: torch.dtype, spoiled: list[tuple[int, str]]
) -> None:
    value = torch.zeros(numel, dtype=torch.complex64 if dtype.is_complex else torch.float32)
    spoiled = [(at, what) for at, what in dict(spoiled).items() if at < numel]
    for at, what in spoiled:
        value[at] = float(what)
    flat = value.to(dtype)
    assert all_finite(flat) is not bool(spoiled)
    found = first_not_finite([("a", torch.ones(2)), ("b", flat)])
    if not spoiled:
        assert found is None
        return
    kinds = {"NaN" if what == "nan" else "Inf" for _, what in spoiled}
    assert found == ("b", len(spoiled), "NaN and Inf" if len(kinds) == 2 else kinds.pop())


@pytest.mark.parametrize("dtype", DTYPES[:4], ids=str)
def test_a_sum_that_overflows_is_no_alarm(dtype: torch.dtype) -> None:
    assert all_finite(torch.full((1000,), torch.finfo(dtype).max, dtype=dtype))


def test_other_kinds_of_tensors() -> None:
    assert all_finite(torch.arange(3))
    assert all_finite(torch.tensor([True]))
    assert all_finite(torch.eye(4).to_sparse())
    assert not all_finite(torch.tensor([[0.0, float("inf")]]).to_sparse())
    assert not all_finite(torch.nn.Parameter(torch.tensor(float("nan"))))
    assert first_not_finite([]) is None


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rank_finds_what_it_brings_itself_and_once(dtype: torch.dtype) -> None:
    check = FiniteCheck(8)
    fine = torch.randn(100, generator=torch.Generator().manual_seed(1)).to(dtype)
    for value, only_added in itertools.product((NAN, INF, -INF), (True, False)):
        spoilt = fine.clone()
        spoilt[-1] = value
        check.look_at_own([fine, spoilt, fine])
        check.look_at_sums([fine], only_added=only_added)
        assert check.taken() == OWN
        assert check.taken() == 0
    check.look_at_own([fine, torch.ones(0), torch.arange(3)])
    check.look_at_sums([fine], only_added=True)
    assert check.taken() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_only_who_brings_large_numbers_looks_at_the_sum(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    check, overflown = FiniteCheck(2), torch.full((5,), INF, dtype=dtype)
    for part, found in ((0.6, SUM), (-0.6, SUM), (0.2, 0)):
        own = torch.full((5,), part * largest, dtype=dtype)
        check.look_at_own([own])
        check.look_at_sums([own], only_added=True)
        assert check.taken() == 0
        check.look_at_own([own])
        check.look_at_sums([own, overflown], only_added=True)
        assert check.taken() == found, part
        check.look_at_own([own])
        check.look_at_sums([own, overflown], only_added=False)
        assert check.taken() == SUM, "what a compression makes of small numbers may be anything"


def test_numbers_of_all_kinds_of_tensors() -> None:
    assert numbers_of(torch.ones(3, dtype=torch.int64)) is None
    assert numbers_of(torch.ones(0)) is None
    assert numbers_of(torch.ones(2, 3, requires_grad=True).t()).shape == (6,)  # type: ignore[union-attr]
    assert not all_finite(torch.tensor([complex(1, NAN)]).conj())
    assert not all_finite(torch.tensor(INF))
    assert not all_finite(torch.tensor([[0.0, NAN]]).to_sparse())
    assert not all_finite(torch.tensor([1.0, NAN]).to(torch.float8_e5m2))
    assert all_finite(torch.full((1000,), 3e38)), "though their sum is not"
