"""Splits the output of a rank into lines, and folds equal lines of several ranks into one."""

import codecs
import re
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

# A line without a newline is a prompt, or a row of dots that grows: it is shown if nothing follows for a while.
QUIET_S = 0.5
BAR_EVERY_S = 5.0
MAX_PARTIAL = 1 << 16
REMEMBERED_LINES = 400
FOLD_S = 0.08
MAX_WAITING = 5000
# The prefix that torch's excepthook adds to every line; the output already shows the rank.
_TORCH_PREFIX = re.compile(r"^\[rank(\d+)\]:(?: |$)")
_TORCH_PREFIXES = re.compile(r"^(?:\[rank\d+\]:(?: |$))+")


class Lines:
    """One stream of one rank. Of a progress bar, which rewrites its line, only the last state is kept."""

    def __init__(self, rank: int, member: bool = False) -> None:
        self.last: deque[str] = deque(maxlen=REMEMBERED_LINES)  # shown or not
        self._prefix = str(rank)
        self._member = member  # its rank may change over time
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""
        self._fed_at = 0.0
        self._bar_at: float | None = None

    def feed(self, data: bytes, now: float) -> list[str]:
        """Add bytes; return the lines they complete."""
        self._fed_at = now
        *whole, self._partial = (self._partial + self._decoder.decode(data)).split("\n")
        found = [self._clean(line) for line in whole]
        if "\r" in self._partial and len(self._partial) <= MAX_PARTIAL:
            if self._bar_at is None:
                self._bar_at = now
            # Only the newest state of a bar is kept; a carriage return at the very end erases nothing yet.
            body = self._partial.rstrip("\r")
            self._partial = "\r" + body.rpartition("\r")[2] + self._partial[len(body) :]
            if now - self._bar_at > BAR_EVERY_S:
                self._bar_at = now
                found.append(self._clean(self._partial))
        elif len(self._partial) > MAX_PARTIAL:
            found.append(self._clean(self._partial))
            self._partial = ""
        if whole:
            self._bar_at = None
        self.last.extend(found)
        return found

    def idle(self, now: float) -> list[str]:
        """The unfinished line, if nothing has been added to it for a while."""
        if self._partial and "\r" not in self._partial and now - self._fed_at > QUIET_S:
            return self.rest()
        return []

    def rest(self) -> list[str]:
        """The unfinished line, if there is one."""
        left, self._partial = self._clean(self._partial + self._decoder.decode(b"", final=True)), ""
        found = [left] if left else []
        self.last.extend(found)
        return found

    def _clean(self, line: str) -> str:
        line = line.rstrip("\r")
        if "\r" in line:
            line = line.rpartition("\r")[2]
        found = (_TORCH_PREFIXES if self._member else _TORCH_PREFIX).match(line)
        if found and (self._member or found[1] == self._prefix):
            line = line[found.end() :]
        return line


_Item = TypeVar("_Item", bound=Hashable)


class Fold(Generic[_Item]):
    """Shows equal lines, or equal items of any kind, that several ranks write within a short time once.

    The lines of one rank never change their order. A line is shown when all ranks have written it, or after `FOLD_S`; a
    line that another rank has written too, behind other lines, waits for those.
    """

    def __init__(self, show: Callable[[tuple[int, ...], _Item], None], ranks: int) -> None:
        self._show = show
        self._ranks = ranks
        self._queues: dict[int, deque[tuple[_Item, float]]] = {}
        self._writers: dict[_Item, Counter[int]] = {}  # the ranks with such a line waiting, and how often
        self._waiting = 0

    def add(self, rank: int, item: _Item, now: float) -> None:
        """Add one line of a rank."""
        self._queues.setdefault(rank, deque()).append((item, now))
        self._writers.setdefault(item, Counter())[rank] += 1
        self._waiting += 1
        self.flush(now)

    def flush(self, now: float) -> None:
        """Show the lines that have waited long enough, or for which no other rank is left to wait."""
        while self._waiting:
            fronts: dict[_Item, tuple[list[int], float]] = {}
            for rank, queue in self._queues.items():
                if queue:
                    item, at = queue[0]
                    ranks, oldest = fronts.setdefault(item, ([], at))
                    ranks.append(rank)
                    fronts[item] = ranks, min(at, oldest)
            # First the lines that no rank has behind others; of those, the oldest.
            item = min(fronts, key=lambda item: (not self._is_at_front(item, fronts), fronts[item][1]))
            ranks, oldest = fronts[item]
            if len(ranks) < self._ranks and now < oldest + FOLD_S and self._waiting <= MAX_WAITING:
                return
            if len(ranks) < self._ranks:  # of lines from about the same time, the lowest rank's
                near = (
                    item for item in fronts if fronts[item][1] < oldest + FOLD_S and self._is_at_front(item, fronts)
                )
                item = min((item, *near), key=lambda item: min(fronts[item][0]))
                ranks = fronts[item][0]
            self._show_first(item, ranks)

    def _is_at_front(self, item: _Item, fronts: dict[_Item, tuple[list[int], float]]) -> bool:
        """Whether this line is the first waiting one of every rank that wrote it."""
        return len(self._writers[item]) == len(fronts[item][0])

    def _show_first(self, item: _Item, ranks: list[int]) -> None:
        writers = self._writers[item]
        for rank in ranks:
            self._queues[rank].popleft()
            writers[rank] -= 1
            if not writers[rank]:
                del writers[rank]
        if not writers:
            del self._writers[item]
        self._waiting -= len(ranks)
        self._show(tuple(sorted(ranks)), item)


def name_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0-2,5`."""
    found = sorted(ranks)
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {spans(found)}"


def spans(ranks: Iterable[int]) -> str:
    """`0-3,6` for 0, 1, 2, 3, 6."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)
