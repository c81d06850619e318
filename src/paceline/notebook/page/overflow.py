"""A cell that writes very much: the first part is shown, the rest is counted, and its last lines are kept."""

from collections import deque

from paceline.launch.lines import Fold
from paceline.notebook.events import Wrote
from paceline.notebook.page.screen import Screen

MAX_SHOWN = 1 << 20
# Ranks that write the same are folded, which costs time for each of them.
MAX_READ = 8 << 20
LAST_LINES = 30
MAX_LINE = 2000

_Line = tuple[tuple[int, ...], str, str]  # ranks, stream, text


class Overflow:
    """Counts what a cell shows, and keeps the end of what it may not show any more."""

    NOTE = "this cell has written more than 1 MiB; the rest is only counted, its last lines come when the cell ends"

    def __init__(self) -> None:
        self.is_full = False
        self._told = False
        self._shown = 0
        self._read = 0
        self._left_out = 0
        self._ends: dict[int, deque[tuple[str, str]]] = {}  # by rank: stream and text
        self._partials: dict[tuple[int, str], str] = {}

    def has_read(self, characters: int) -> bool:
        """Count what came in; True when that is now too much, whatever of it was shown."""
        self._read += characters
        return self._read > MAX_READ and not self.is_full

    def has_just_filled(self) -> bool:
        """True once."""
        if self.is_full and not self._told:
            self._told = True
            return True
        return False

    def admit(self, ranks: tuple[int, ...], stream: str, line: str) -> str | None:
        """How a line that came out of the fold is shown: as it is, cut, or not at all."""
        if self.is_full:
            self._left_out += len(line) + 1
            for rank in ranks:
                self._keep(rank, stream, [line])
            return None
        room = MAX_SHOWN - self._shown
        self._shown += len(line) + 1
        self.is_full = self._shown > MAX_SHOWN
        return line if len(line) <= room else f"{line[:room]}… ({_amount(len(line) - room)} of this line left out)"

    def takes(self, event: Wrote, screen: Screen) -> bool:
        """Count text without looking at it closely. Bars are left to the screen: they stay in their place."""
        if screen.area is not None or "\r" in event.text:
            return False
        source = event.rank, event.stream
        self._left_out += len(event.text)
        rest = [] if not screen.has_partial else screen.rest()
        *lines, partial = ("".join(rest) + self._partials.get(source, "") + event.text).split("\n")
        self._keep(event.rank, event.stream, lines[-LAST_LINES:])
        self._partials[source] = partial[-MAX_LINE:]
        return True

    def _keep(self, rank: int, stream: str, lines: list[str]) -> None:
        end = self._ends.setdefault(rank, deque(maxlen=LAST_LINES))
        end.extend((stream, line[:MAX_LINE]) for line in lines)

    def last_lines(self) -> list[_Line]:
        """What to show at the end of the cell: how much is missing, and the last lines, equal ones folded."""
        for (rank, stream), partial in self._partials.items():
            if partial:
                self._keep(rank, stream, [partial])
        if not self._left_out:
            return []
        found: list[_Line] = []
        streams = {"stdout": 1, "stderr": 2}
        names = {number: name for name, number in streams.items()}
        fold = Fold(lambda ranks, text, channel: found.append((ranks, names[channel], text)), len(self._ends) + 1)
        for rank, end in self._ends.items():
            for stream, line in end:
                fold.add(rank, line, 0.0, streams[stream])
        fold.flush(float("inf"))
        last = found[-LAST_LINES:]
        note = f"paceline: {_amount(self._left_out)} left out here; the last {len(last)} lines:"
        return [((), "stderr", note), *last]


def _amount(characters: int) -> str:
    if characters < 1 << 20:
        return f"{characters / (1 << 10):.0f} KiB"
    return f"{characters / (1 << 20):.1f} MiB"
