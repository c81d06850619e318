"""Checksums of slices: one bit is always seen, and so are rows that have changed places."""

import random

import pytest
import torch

from paceline.strategies.checksums import ROW, checksum
from tests.models import draw


@pytest.mark.parametrize("numel", [1, 2, 3, 7, 8, 255, 2 * ROW, 3 * ROW + 1, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.uint8])
def test_every_bit_counts(numel: int, dtype: torch.dtype) -> None:
    flat = (draw(numel, numel) * 100).to(dtype)
    before, drawn = int(checksum(flat)), random.Random(numel)
    raw = flat.view(torch.uint8)
    for _ in range(50):
        at, bit = drawn.randrange(len(raw)), 1 << drawn.randrange(8)
        raw[at] ^= bit
        assert int(checksum(flat)) != before
        raw[at] ^= bit
    assert int(checksum(flat)) == before


def test_rows_that_change_places_are_seen() -> None:
    flat = draw(0, 6 * ROW)
    moved = torch.cat([flat[2 * ROW : 4 * ROW], flat[: 2 * ROW], flat[4 * ROW :]])
    assert int(checksum(moved)) != int(checksum(flat))


def test_it_does_not_depend_on_where_the_memory_begins() -> None:
    flat = draw(0, 1001)
    assert int(checksum(flat[1:])) == int(checksum(flat[1:].clone()))
    assert int(checksum(flat[:0])) == 0
