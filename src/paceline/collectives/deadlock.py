"""Whether ranks wait for each other without end, from the records that they post.

When a deadlock is proven
-------------------------
A rank says which threads of it start collectives of the group, which of those wait and in which sequence (of
collectives that all ranks start in the same order: the checked collectives, the buckets of one replica), and how many
collectives it has started in each sequence. Then no rank can make progress if

1. on every rank of the group all those threads wait, none with a timeout that ends its wait within seconds, and
2. for every wait there is a rank that has started fewer collectives in its sequence.

For that rank would have to start the one that is missing, and all its threads wait. A merely slow transfer fails (2):
a rank that has left a collective has started it. A rank that computes, loads data or saves fails (1): others wait for
it, and it is named in the log. So does one that waits in something unknown here: in a collective of torch's own, in one
of another group, or in a device that NCCL holds up, where no host waits.

A thread that has never started a collective of this group is not counted. If that thread were to start the missing one,
on a rank all of whose other threads wait for a collective that comes after it on the other ranks, this rule would err.

Records may be slightly old, so all ranks must have looked again, twice, with nothing changed.

When it is only assumed
-----------------------
If (1) holds and (2) cannot be decided, because not everything that ranks wait for is counted (the forming of a group,
the future of a hook), different waits count as a deadlock after `settle_s`.
"""

import time
from collections.abc import Mapping

from paceline.collectives.peers import PeerRecord, Wait
from paceline.collectives.protocols import SAME_ORDER

LOOKS = 2


class DeadlockDetector:
    """One rank's observations of a possible deadlock so far."""

    def __init__(self, size: int, settle_s: float) -> None:
        self._size = size
        self._settle_s = settle_s
        self._seen: object = None
        self._looks: dict[int, int] = {}
        self._began = 0.0

    def forget(self) -> None:
        self._seen = None

    def check(self, records: Mapping[int, PeerRecord]) -> str | None:
        """Update from the records of all ranks, including this one's. Returns the text of a deadlock once it is
        certain."""
        if len(records) < self._size or not all(_is_stuck(record) for record in records.values()):
            self.forget()
            return None
        differ = _first_difference(records)
        proven = bool(differ) or _all_blocked(records)
        if not proven and len({wait.what for record in records.values() for wait in record.waits}) == 1:
            self.forget()
            return None
        seen = [(proven, record.waits, record.sequences) for _, record in sorted(records.items())]
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._began = seen, now
            self._looks = {rank: record.looks for rank, record in records.items()}
            return None
        looked_again = all(record.looks >= self._looks[rank] + LOOKS for rank, record in records.items())
        if not looked_again or (not proven and now - self._began < self._settle_s):
            return None
        calls = {rank: f"{differ.get(rank, '')}waits in {_told(record.waits)}" for rank, record in records.items()}
        told = "; ".join(f"rank {rank} {calls[rank]}" for rank in sorted(calls))
        return f"deadlock: the ranks are waiting for each other in different operations: {told}. {SAME_ORDER}"


def _is_stuck(record: PeerRecord) -> bool:
    return bool(record.waits) and not record.free and not any(wait.brief for wait in record.waits)


def _all_blocked(records: Mapping[int, PeerRecord]) -> bool:
    return all(_blocked(wait, record, records) for record in records.values() for wait in record.waits)


def _blocked(wait: Wait, own: PeerRecord, records: Mapping[int, PeerRecord]) -> bool:
    return any(other.issued(wait.sequence) < own.issued(wait.sequence) for other in records.values())


def _first_difference(records: Mapping[int, PeerRecord]) -> dict[int, str]:
    """The collective of each rank at the first difference in one sequence; empty if no difference is known.

    Only if all ranks wait in that sequence: their messages then never match.
    """
    names = {wait.sequence for record in records.values() for wait in record.waits}
    if len(names) > 1:
        return {}
    (name,) = names
    if any(name not in record.sequences for record in records.values()):
        return {}
    sequences = {rank: record.sequences[name] for rank, record in records.items()}
    first = max(sequence.count - len(sequence.recent) for sequence in sequences.values())
    last = min(sequence.count for sequence in sequences.values())
    for number in range(first, last):
        calls = {rank: sequence.recent[number - sequence.count] for rank, sequence in sequences.items()}
        if len(set(calls.values())) > 1:
            return {rank: f"issued {call} as collective {number + 1}, and " for rank, call in calls.items()}
    return {}


def _told(waits: list[Wait]) -> str:
    return " and in ".join(map(str, waits))
