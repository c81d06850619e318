"""Numbers that are not finite."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.agree import first_not_finite
from paceline.collectives.finite import all_finite

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
