"""A slow rank is named from what ranks are found doing."""

import pytest

from paceline.launch.reports import Mark
from paceline.launch.stragglers import LOOKS, STEPS, Stragglers
from paceline.phase import Phase

FORWARD, BACKWARD, WAITING = Phase.FORWARD, Phase.BACKWARD, Phase.WAITING
Times = list[tuple[Phase, float]]  # what a rank does in a step, and for which part of it


def found_in(times: Times, at: float) -> Phase:
    """What a rank does at this part of a step."""
    for phase, share in times:
        if at < share:
            return phase
        at -= share
    return times[-1][0]


def looks(ranks: list[Times], looks: int = 4 * LOOKS, steps: float = 4 * STEPS) -> list[str]:
    """What is said of ranks that repeat these steps."""
    stragglers, said = Stragglers(), []
    for look in range(looks):
        at = look * (steps + 0.37) / looks  # looks fall on all parts of a step
        marks = {rank: Mark(found_in(times, at % 1), int(at), 0.0) for rank, times in enumerate(ranks)}
        said.append(stragglers.look(marks))
    return [text for text in said if text]


# A forward takes one part and a backward two. Who is four times as slow makes the others wait, for moments, afterwards.
QUICK: Times = [(FORWARD, 1 / 12), (BACKWARD, 2 / 12), (Phase.BETWEEN, 9 / 12)]
SLOW: Times = [(FORWARD, 4 / 12), (BACKWARD, 8 / 12)]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_who_is_slow_in_everything_is_named_once(ranks: int) -> None:
    [said] = looks([*[QUICK] * (ranks - 1), SLOW])
    assert said.startswith(f"rank {ranks - 1} is slower than the others: it spends ")


def test_who_is_slow_in_its_backward_is_named_when_the_others_wait_long() -> None:
    waits: Times = [(FORWARD, 0.2), (BACKWARD, 0.2), (WAITING, 0.6)]
    [said] = looks([waits, [(FORWARD, 0.2), (BACKWARD, 0.8)], waits])
    assert said.startswith("rank 1 is slower than the others: they wait for other ranks ") and said.endswith(" 0%")


@pytest.mark.parametrize(
    "ranks",
    [
        [QUICK, QUICK],
        [SLOW, SLOW, SLOW],
        [
            [(FORWARD, 0.3), (BACKWARD, 0.3), (Phase.BETWEEN, 0.4)],
            [(FORWARD, 0.3), (BACKWARD, 0.7)],
        ],  # uneven, as by uneven lanes
        [[(FORWARD, 0.2), (WAITING, 0.8)], [(FORWARD, 0.2), (WAITING, 0.8)]],  # a slow network
        [[(FORWARD, 0.1), (BACKWARD, 0.9)], [(Phase.EVALUATE, 0.5), (FORWARD, 0.5)]],  # one of them evaluates
        [SLOW],
    ],
)
def test_who_is_not_slow_is_not_named(ranks: list[Times]) -> None:
    assert looks(ranks) == []


def test_a_few_steps_or_looks_are_no_sample() -> None:
    assert looks([QUICK, SLOW], looks=LOOKS - 1) == []
    assert looks([QUICK, SLOW], steps=STEPS - 1) == []
