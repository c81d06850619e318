"""The arenas that a rank lends to its collectives: used again, and no more of them than that takes."""

from paceline.collectives.shm.arenas import KEPT_AT_MOST, ArenaPool, Arenas

MIB = 2**20


def lend(pool: ArenaPool, nbytes: int) -> int:
    """The size of the arena for one collective, which is over at once."""
    block = pool.take(nbytes)
    pool.give(block)
    return block.numel()


def test_large_ones_are_not_rounded_up_to_powers_of_two() -> None:
    pool = ArenaPool(Arenas())
    assert lend(pool, 9 * MIB - 5) == 9 * MIB
    assert lend(pool, 5000) == 8192


def test_what_was_needed_once_is_not_kept() -> None:
    pool = ArenaPool(Arenas())
    lend(pool, 40 * MIB)
    assert pool.kept == 0
    lend(pool, 40 * MIB)
    assert pool.kept == 40 * MIB
    lend(pool, KEPT_AT_MOST + 1)
    lend(pool, KEPT_AT_MOST + 1)
    assert pool.kept == 40 * MIB


def test_several_sizes_share_an_arena() -> None:
    pool = ArenaPool(Arenas())
    for nbytes in (8 * MIB, 9 * MIB, 15 * MIB, 8 * MIB, 9 * MIB, 15 * MIB, 8 * MIB):
        lend(pool, nbytes)
    assert pool.kept == 15 * MIB
    assert lend(pool, 2 * MIB) == 2 * MIB, "not one that is much too large"


def test_arenas_that_are_lent_at_the_same_time_are_different() -> None:
    pool = ArenaPool(Arenas())
    first, second = pool.take(2 * MIB), pool.take(2 * MIB)
    assert first.data_ptr() != second.data_ptr()
