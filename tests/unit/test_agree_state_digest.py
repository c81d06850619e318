"""One digest of many tensors: any changed bit changes it, and nothing else does."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.agree.state_digest import ROW, SMALL_BYTES, TABLE, start_digest, state_digest
from paceline.errors import UsageError

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.uint64,
    torch.bool,
]


def filled(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of any bits."""
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=torch.manual_seed(seed))
    if dtype is torch.bool:
        raw &= 1
    return raw.view(dtype)


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Change one bit of a tensor's memory."""
    tensor.view(torch.uint8)[bit // 8] ^= 1 << bit % 8


@st.composite
def tensors_and_bit(draw: st.DrawFn) -> tuple[list[torch.Tensor], int, int]:
    edges = [0, 1, 7, ROW, ROW + 1, 2 * ROW, SMALL_BYTES // 8, SMALL_BYTES // 4 + 3, SMALL_BYTES + 5]
    sizes = st.one_of(st.sampled_from(edges), st.integers(0, 3000))
    several = draw(st.lists(st.tuples(sizes, st.sampled_from(DTYPES)), min_size=1, max_size=6))
    tensors = [filled(numel, dtype, seed) for seed, (numel, dtype) in enumerate(several)]
    full = [number for number, tensor in enumerate(tensors) if tensor.numel()]
    if not full:
        tensors, full = [*tensors, filled(1, torch.float32)], [len(tensors)]
    chosen = draw(st.sampled_from(full))
    return tensors, chosen, draw(st.integers(0, 8 * tensors[chosen].nbytes - 1))


@given(tensors_and_bit())
def test_a_flipped_bit_is_seen_and_flipped_back_it_is_gone(case: tuple[list[torch.Tensor], int, int]) -> None:
    tensors, chosen, bit = case
    before = state_digest(tensors)
    assert -(2**63) <= before < 2**63
    flip(tensors[chosen], bit)
    assert state_digest(tensors) != before
    flip(tensors[chosen], bit)
    assert state_digest(tensors) == before


def test_200_flips_of_sign_exponent_and_mantissa_are_all_seen() -> None:
    draw = random.Random(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 8))
    state = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    before = state_digest(state)
    seen = 0
    for number in range(200):
        tensor = state[number % len(state)].view(-1)
        bits = 8 * tensor.dtype.itemsize
        within = [bits - 1, bits - 2, bits - 5, bits // 2, 0][number // len(state) % 5]
        bit = draw.randrange(tensor.numel()) * bits + within
        flip(tensor, bit)
        seen += state_digest(state) != before
        flip(tensor, bit)
    assert seen == 200
    assert state_digest(state) == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_offsets_and_views_do_not_matter(dtype: torch.dtype) -> None:
    for rows, columns in ((5, 7), (130, 211)):
        plain = filled(rows * columns, dtype).view(rows, columns)
        digest = state_digest([plain])
        assert state_digest([plain.t().contiguous().t()]) == digest
        shifted = torch.cat([filled(3, dtype), plain.view(-1)])[3:].view(rows, columns)
        assert shifted.storage_offset() == 3
        assert state_digest([shifted]) == digest


def test_views_that_are_conjugated_or_negated_are_their_values() -> None:
    for numel in (3, SMALL_BYTES):
        value = filled(numel, torch.complex64)
        assert state_digest([value.conj()]) == state_digest([value.conj().resolve_conj()]) != state_digest([value])
        negated = value.conj().imag
        assert negated.is_neg()
        assert state_digest([negated]) == state_digest([negated.resolve_neg()]) != state_digest([value.imag])


def test_order_and_sizes_matter() -> None:
    for numel in (1, 8, 16, ROW * 2, SMALL_BYTES):
        a, b, c = (filled(numel, torch.float32, seed) for seed in range(3))
        digests = {state_digest(order) for order in ([a, b, c], [b, a, c], [a, c, b], [c, b, a], [a, b], [a])}
        assert len(digests) == 6
    nothing = [
        state_digest([]),
        state_digest([torch.empty(0)]),
        *(state_digest([torch.zeros(n)]) for n in (1, 2, 3, ROW, 2 * ROW)),
    ]
    assert len(set(nothing)) == len(nothing)
    assert state_digest([torch.tensor(1.0)]) != state_digest([torch.tensor(2.0)])


def test_rows_that_change_places_are_seen() -> None:
    table = filled(300 * 256, torch.float32).view(300, 256)
    other = table.clone()
    other[[10, 200]] = table[[200, 10]]
    assert state_digest([table]) != state_digest([other])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numel", [2, 254, 2 * SMALL_BYTES])
def test_flipped_signs_of_a_whole_tensor_are_seen(dtype: torch.dtype, numel: int) -> None:
    value = torch.randn(numel, generator=torch.manual_seed(0)).to(dtype)
    assert state_digest([value]) != state_digest([-value])


def test_threads_and_processes_do_not_matter() -> None:
    tensors = [torch.arange(3_000_000, dtype=torch.int32), torch.arange(700, dtype=torch.float64), torch.tensor(True)]
    assert tensors[0].nbytes // 8 // ROW < TABLE < 3_000_000
    threads = torch.get_num_threads()
    digests = set()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            digests.add(state_digest(tensors))
    finally:
        torch.set_num_threads(threads)
    assert digests == {7921978064320525390}  # nothing of it is drawn anew in each process


def test_more_rows_than_the_table_has_factors() -> None:
    tensor = torch.zeros(8 * ROW * (TABLE + 5), dtype=torch.uint8)
    before = state_digest([tensor])
    for place in (0, 8 * ROW * TABLE, tensor.numel() - 1):
        tensor[place] = 128
        assert state_digest([tensor]) != before
        tensor[place] = 0


def test_parameters_need_no_graph_and_a_started_digest_is_there() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    started = start_digest([weight])
    assert started.value() == state_digest([weight.detach()])


def test_what_has_no_plain_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a dense tensor, got one of layout torch.sparse_coo"):
        state_digest([torch.eye(3).to_sparse()])
    with pytest.raises(UsageError, match="on meta"):
        state_digest([torch.empty(3, device="meta")])
