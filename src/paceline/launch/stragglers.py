"""Finds a rank that is slower than the others, by sampling what all ranks are doing twenty times a second.

A slow rank works while the others wait for it after their backward. A long wait is noted as one; a short one looks like
the script's own code between steps. So a rank is slow if the others are found waiting and it is not, or if it is found
in data, forward, backward and update much more often than the others. Not detected: a script that is slow between steps
by less than a tenth of a second, and a slow device whose host runs ahead.
"""

from collections import Counter
from collections.abc import Mapping
from statistics import median

from paceline.launch.reports import Mark
from paceline.phase import Phase

# This many looks, over this many steps, make a sample: at least five seconds.
LOOKS = 100
STEPS = 20
# A slow rank is found at its own work this much more often than the middle one of the others is, or they are found
# waiting this much more often than it is: twice as often, and by a quarter of the time.
TIMES, MORE = 2.0, 0.25
_OWN = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_IN_STEP = (*_OWN, Phase.BETWEEN, Phase.WAITING)


class Stragglers:
    """Finds slow ranks of one attempt, and reports each of them once."""

    def __init__(self) -> None:
        self._named: set[int] = set()
        self._restart()

    def _restart(self) -> None:
        self._looks, self._first_step = 0, -1
        self._own: Counter[int] = Counter()
        self._waiting: Counter[int] = Counter()

    def look(self, marks: Mapping[int, Mark]) -> str:
        """Add a sample of what ranks are doing. Returns a message about a slow rank, or an empty string."""
        if len(marks) < 2 or any(mark.phase not in _IN_STEP for mark in marks.values()):
            return ""  # a rank evaluates or saves, so the others may wait legitimately
        step = min(mark.step for mark in marks.values())
        if self._first_step < 0 or step < self._first_step:
            self._restart()
            self._first_step = step
        self._looks += 1
        for rank, mark in marks.items():
            self._own[rank] += mark.phase in _OWN
            self._waiting[rank] += mark.phase is Phase.WAITING
        if self._looks < LOOKS or step - self._first_step < STEPS:
            return ""
        found = self._judge(list(marks))
        self._restart()
        return found

    def _judge(self, ranks: list[int]) -> str:
        for rank in ranks:
            if rank in self._named:
                continue
            others = [other for other in ranks if other != rank]
            own, usual = self._own[rank] / self._looks, median(self._own[other] for other in others) / self._looks
            waits, wait = self._waiting[rank] / self._looks, median(self._waiting[one] for one in others) / self._looks
            if _exceeds(wait, waits):
                self._named.add(rank)
                return (
                    f"rank {rank} is slower than the others: they wait for other ranks {wait:.0%} of the time, and it "
                    f"does {waits:.0%}"
                )
            if _exceeds(own, usual):
                self._named.add(rank)
                return (
                    f"rank {rank} is slower than the others: it spends {own:.0%} of the time in forward, "
                    f"backward and update, and they do {usual:.0%}"
                )
        return ""


def _exceeds(high: float, low: float) -> bool:
    return high >= TIMES * low and high - low >= MORE
