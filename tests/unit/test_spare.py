"""Memory that is used again."""

import copy

import torch

from paceline.collectives.spare_memory import MOST_BYTES, SpareMemory


def test_memory_is_lent_to_one_at_a_time_and_used_again() -> None:
    spare = SpareMemory()
    one = spare.take(100, torch.float32)
    assert one.numel() >= 100
    assert spare.take(50, torch.float32).data_ptr() != one.data_ptr(), "it was not given back"
    spare.give_back(one)
    assert spare.take(50, torch.float32).data_ptr() == one.data_ptr()


def test_what_is_too_small_or_too_much_is_not_kept() -> None:
    spare = SpareMemory()
    small = spare.take(10, torch.float32)
    spare.give_back(small)
    assert spare.take(1000, torch.float32).numel() >= 1000
    huge = torch.empty(MOST_BYTES + 1, dtype=torch.uint8)
    spare.give_back(huge)
    assert spare.take(1, torch.uint8).data_ptr() != huge.data_ptr()


def test_a_copy_begins_with_nothing() -> None:
    spare = SpareMemory()
    mine = spare.take(10, torch.float32)
    spare.give_back(mine)
    assert copy.deepcopy(spare).take(10, torch.float32).data_ptr() != mine.data_ptr()
