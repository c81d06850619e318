"""Over how many ranks shards are made, and what is refused."""

import pytest

from paceline.errors import UsageError
from paceline.placement import placement_of, shard_size


@pytest.mark.parametrize(
    ("shard", "copies", "world", "size"),
    [(None, None, 6, 6), (2, None, 6, 2), (None, 1, 6, 6), (None, 2, 6, 3), (None, 3, 6, 2), (None, 6, 6, 1)],
)
def test_shards_are_made_over_so_many_ranks(shard: int | None, copies: int | None, world: int, size: int) -> None:
    assert shard_size(shard, world, copies) == size


@pytest.mark.parametrize(
    ("shard", "copies", "text"),
    [
        (4, None, r"shard=4 does not divide the world of 6 ranks, .* expected one of 1, 2, 3, 6"),
        (None, 4, r"copies=4 does not divide the world of 6 ranks, .* expected one of 1, 2, 3, 6"),
        (None, 0, r"copies=0 is not a number of ranks"),
        (None, True, r"copies=True is not a number of ranks"),
    ],
)
def test_a_number_that_cannot_be_is_refused(shard: object, copies: object, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        shard_size(shard, 6, copies)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(UsageError, match=r"shard=2 and copies=2 set the same thing"):
        placement_of("zero1", 2, 2)
    with pytest.raises(UsageError, match=r"copies=2 needs shards"):
        placement_of("ddp", None, 2)
    assert placement_of("zero1", 1).name == "ddp"
    assert placement_of("zero1", None, 1).name == "zero1"
