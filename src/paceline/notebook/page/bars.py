"""Lines that ranks rewrite in place, such as progress bars: those of all ranks stand together."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import uuid4

from paceline.launch.lines import spans
from paceline.notebook.page.screen import Area
from paceline.notebook.page.show import Show

EVERY_S = 0.1

Source = tuple[int, str]  # rank and stream


@dataclass(eq=False)
class Board:
    """One place on the page with a line per rank. Equal lines are one."""

    areas: dict[Source, Area] = field(default_factory=dict)
    display_id: str = ""
    _shown: str = ""
    is_settled: bool = False

    def text(self) -> str:
        rows: list[tuple[str, str]] = []
        drawn = {source: area.lines() for source, area in sorted(self.areas.items())}
        for number in range(max(map(len, drawn.values()), default=0)):
            writers: dict[str, list[int]] = {}
            for (rank, _), lines in drawn.items():
                if number < len(lines) and lines[number]:
                    writers.setdefault(lines[number], []).append(rank)
            rows += [(f"[{spans(set(ranks))}]", line) for line, ranks in writers.items()]
        width = max((len(gutter) for gutter, _ in rows), default=0)
        return "\n".join(f"{gutter:<{width}} {line}" for gutter, line in rows)

    def publish(self, show: Show) -> None:
        """Show it in a new place."""
        self.display_id = f"paceline-bars-{uuid4().hex}"
        self._shown, self.is_settled = "", False
        self.draw(show)

    def draw(self, show: Show) -> None:
        """Show what has changed, where it was published."""
        if not self.display_id or self.is_settled:
            return
        if any(area.changed for area in self.areas.values()) or not self._shown:
            text = self.text()
            if text and text != self._shown:
                self._shown = text
                show.live(self.display_id, text)
            for area in self.areas.values():
                area.changed = False
        if all(area.is_over for area in self.areas.values()):
            self.is_settled = True
            show.settle(self.display_id)


class Boards:
    """All boards of a cell, and when they are drawn."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._boards: list[Board] = []
        self._drawn_at = float("-inf")

    def open(self, areas: Iterable[tuple[Source, Area]]) -> Board | None:
        """Find a place for areas that begin together. Returns the board if it is a new one."""
        placed = dict(areas)
        newest = self._boards[-1] if self._boards else None
        if newest is not None and not newest.areas.keys() & placed.keys() and not newest.is_settled:
            newest.areas |= placed
            return None
        board = Board(placed)
        self._boards.append(board)
        return board

    def drop(self, ranks: Iterable[int]) -> None:
        """Take away what these ranks have drawn."""
        gone = set(ranks)
        for board in self._boards:
            board.areas = {source: area for source, area in board.areas.items() if source[0] not in gone}
        self._boards = [board for board in self._boards if board.areas]

    def settle(self) -> None:
        """Draw those whose bars are over for the last time: text that comes next stands below them."""
        for board in self._boards:
            if all(area.is_over for area in board.areas.values()):
                board.draw(self._show)

    def draw(self, now: float, *, at_once: bool = False) -> None:
        """Bring all boards up to date, ten times a second at most."""
        if not at_once and now < self._drawn_at + EVERY_S:
            return
        self._drawn_at = now
        for board in self._boards:
            board.draw(self._show)
