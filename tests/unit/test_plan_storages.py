"""The highest point of a timeline, by hand-made ones and by any."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.memory_plan.storages import HEAP_BLOCK_BYTES, StorageEvent, Timeline, between, highest

BORN, FREED, TAKEN = StorageEvent.BORN, StorageEvent.FREED, StorageEvent.TAKEN


def timeline(
    sizes: list[int], *events: tuple[StorageEvent, int], kinds: list[str] | None = None, back: int = 0
) -> Timeline:
    return Timeline(tuple(sizes), tuple(kinds or ["x"] * len(sizes)), events, back)


def test_the_highest_point_is_found_with_what_is_there() -> None:
    course = timeline([10, 5, 7], (BORN, 0), (BORN, 1), (FREED, 0), (BORN, 2), kinds=["a", "b", "a"], back=2)
    top = highest(course, grads_are_copied=False)
    assert top.total == 15
    assert dict(top.by_kind) == {"a": 10, "b": 5}
    assert not top.in_backward


def test_taken_gradients_stay_or_leave() -> None:
    course = timeline([10, 5], (BORN, 0), (TAKEN, 0), (BORN, 1), (TAKEN, 1), (FREED, 0), (FREED, 1))
    assert highest(course, grads_are_copied=False).total == 15
    assert highest(course, grads_are_copied=True).total == 10


def test_storages_are_rounded_as_the_allocator_does() -> None:
    course = timeline([1, 513], (BORN, 0), (BORN, 1))
    assert highest(course, grads_are_copied=False, granularity=512).total == 512 + 1024


def test_small_blocks_are_told_apart() -> None:
    course = timeline([HEAP_BLOCK_BYTES, 100], (BORN, 0), (BORN, 1))
    assert highest(course, grads_are_copied=False).in_heap == 100


def test_nothing_happens() -> None:
    assert highest(timeline([]), grads_are_copied=False).total == 0


def test_sizes_grow_evenly_with_the_batch() -> None:
    first = timeline([100, 8], (BORN, 0), (BORN, 1))
    second = timeline([100, 16], (BORN, 0), (BORN, 1))
    assert between(first, 2, second, 4, 10).sizes == (100, 40)
    assert between(first, 2, second, 4, 1).sizes == (100, 4)
    assert not first.same_events(timeline([100, 8], (BORN, 1), (BORN, 0)))


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 20)), min_size=1, max_size=30))
def test_the_peak_is_no_less_than_any_storage_and_no_more_than_all(lives: list[tuple[int, int]]) -> None:
    events: list[tuple[int, int, StorageEvent, int]] = []
    for number, (_, length) in enumerate(lives):
        events += [(number, 0, BORN, number), (number + length, 1, FREED, number)]
    course = timeline(
        [size for size, _ in lives], *((event, number) for _, _, event, number in sorted(events, key=lambda e: e[:2]))
    )
    top = highest(course, grads_are_copied=False).total
    sizes = [size for size, _ in lives]
    assert max(sizes) <= top <= sum(sizes)
