"""One stream of one rank, read as a terminal would: lines that have ended, and lines that are still being rewritten.

Of those, such as progress bars, the ones of all ranks are shown together.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import uuid4

from paceline.launch.lines import spans
from paceline.notebook.output.display import Display

# More rows than this start another area: lines so far back are not rewritten.
MAX_ROWS = 16
_MUCH = 1 << 16
_REWRITES = re.compile(r"[\r\b]|\x1b\[[0-9;?]*[A-Zhlsu]")
_TOKEN = re.compile(r"\r\n|[\n\r\b]|\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[^\n\r\b\x1b]+|\x1b")
# An incomplete control sequence, whose end decides what it is.
_UNFINISHED = re.compile(r"(?:\r|\x1b(?:\[[0-9;?]*|\][^\x07\x1b]{0,200})?)\Z")
_COMPLETE = re.compile(r"\b100 ?%|\b(\d+)/\1\b")
_STYLE = re.compile(r"\x1b\[([0-9;]*)m")


class Row:
    """One line of characters with their styles, and a cursor."""

    def __init__(self) -> None:
        self._cells: list[tuple[str, str]] = []  # style, character
        self.column = 0
        self.is_fresh = True  # it was written from left to right

    def write(self, text: str, style: str) -> None:
        if self.column > _MUCH:
            return
        if self.column > len(self._cells):
            self._cells += [("", " ")] * (self.column - len(self._cells))
        self._cells[self.column : self.column + len(text)] = [(style, character) for character in text]
        self.column += len(text)

    def erase(self, how: str) -> None:
        if how == "2":
            self._cells.clear()
        elif how == "1":
            self._cells[: self.column] = [("", " ")] * min(self.column, len(self._cells))
        else:
            del self._cells[self.column :]

    @property
    def is_blank(self) -> bool:
        return all(character.isspace() for _, character in self._cells)

    def text(self, *, padded: bool = True) -> str:
        """Its text, with or without the blanks at its end."""
        end = len(self._cells)
        while end and not padded and self._cells[end - 1][1].isspace():
            end -= 1
        found, style = [], ""
        for wanted, character in self._cells[:end]:
            if wanted != style:
                found.append(("\x1b[0m" if style else "") + wanted)
                style = wanted
            found.append(character)
        return "".join(found) + ("\x1b[0m" if style else "")


@dataclass
class Area:
    """Lines that are rewritten in place: progress bars, dots that grow."""

    rows: list[Row] = field(default_factory=lambda: [Row()])
    at: int = 0
    is_over: bool = False
    changed: bool = True
    ends_with_bar: bool = False  # text has arrived meanwhile: a bar after this one goes below it

    @property
    def row(self) -> Row:
        return self.rows[self.at]

    @property
    def at_rest(self) -> bool:
        """Whether all its lines seem to have ended: the next one is empty."""
        if len(self.rows) < 2 or self.at < len(self.rows) - 1 or not self.row.is_blank:
            return False
        # The line of an inner bar is empty too, each time that bar has finished.
        return self.row.is_fresh or self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether the last bar says that it has finished."""
        return len(self.rows) > 1 and bool(_COMPLETE.search(self.rows[-2].text()))

    def lines(self) -> list[str]:
        return [row.text(padded=False) for row in self.rows]

    def down(self, count: int = 1) -> None:
        column = self.row.column
        self.at += count
        while len(self.rows) <= self.at:
            self.rows.append(Row())
        self.row.column = column

    def next_line(self) -> None:
        self.down()
        self.row.column = 0

    def up(self, count: int) -> None:
        column = self.row.column
        self.at = max(0, self.at - count)
        self.row.column = column
        self.row.is_fresh = False


class TerminalEmulator:
    """Takes text as it comes. Returns lines that have ended, and areas when they begin, which change later."""

    def __init__(self) -> None:
        self.area: Area | None = None
        self.written_at = 0.0
        self._row = Row()
        self._style = ""
        self._held = ""

    @property
    def has_partial(self) -> bool:
        """Whether a plain line has begun but not ended."""
        return self.area is None and not self._row.is_blank

    def write(self, text: str, now: float) -> list[str | Area]:
        self.written_at = now
        text = self._held + text
        found = _UNFINISHED.search(text)
        self._held = found[0] if found else ""
        text = text[: len(text) - len(self._held)]
        if len(text) > _MUCH and "\r" in text:
            text = _last_states(text)
        out: list[str | Area] = []
        is_plain = not _REWRITES.search(text) and "\x1b" not in text.rpartition("\n")[2]
        if self.area is None and not self._style and is_plain:
            return self._write_plain(text)
        for token in _TOKEN.findall(text):
            if token in ("\n", "\r\n"):
                self._end_line(out)
            elif token == "\r":
                self._return(out)
            elif token == "\b":
                self._current_row().column = max(0, self._current_row().column - 1)
            elif token[0] != "\x1b":
                self._current_row().write(token[:_MUCH], self._style)
                self._touch()
            else:
                self._apply(token)
        return out

    def linger(self) -> Area:
        """Make the unfinished line an area of its own: it is shown before it ends."""
        area = self._open_area()
        area.row.is_fresh = False
        return area

    def rest(self) -> str:
        """The line that has not ended, if there is one; the area is over."""
        text = self._row.text() if self.area is None else ""
        self.reset()
        return text

    def reset(self) -> None:
        """Start over: what was shown stays as it is."""
        self._leave()
        self._style = self._held = ""

    def _write_plain(self, text: str) -> list[str | Area]:
        *lines, partial = text.split("\n")
        found: list[str | Area] = list(lines)
        if lines:
            found[0] = self._row.text() + lines[0]
            self._row = Row()
        if len(partial) > _MUCH:  # a line without an end is not held forever
            found.append(self._row.text() + partial)
            self._row = Row()
        else:
            self._row.write(partial, "")
        return found

    def _current_row(self) -> Row:
        return self._row if self.area is None else self.area.row

    def _touch(self) -> None:
        if self.area is not None:
            self.area.changed = True

    def _return(self, out: list[str | Area]) -> None:
        area = self.area
        if area is not None and area.ends_with_bar and area.at_rest and area.is_complete:
            self._leave()
        if self.area is None:
            out.append(self._open_area())
        row = self._current_row()
        row.column = 0
        row.is_fresh = False

    def _open_area(self) -> Area:
        """Make the current line the first one of an area."""
        self.area, self._row = Area([self._row]), Row()
        return self.area

    def _end_line(self, out: list[str | Area]) -> None:
        area = self.area
        if area is None:
            out.append(self._row.text())
            self._row = Row()
            return
        is_last = area.at == len(area.rows) - 1
        if is_last and area.row.is_fresh and not area.row.is_blank:
            # A line that was not rewritten, below the bars: plain text again.
            out.append(area.rows.pop().text())
            area.at -= 1
            self._leave()
        elif is_last and len(area.rows) >= MAX_ROWS:
            self._leave()
        else:
            area.next_line()

    def _leave(self) -> None:
        if self.area is not None:
            self.area.is_over = self.area.changed = True
        self.area, self._row = None, Row()

    def _apply(self, escape: str) -> None:
        if escape[-1] == "m":
            self._set_style(escape)
            return
        what, numbers = escape[-1], escape[2:-1]
        count = int(numbers) if numbers.isdigit() else 1
        row = self._current_row()
        if what == "K":
            row.erase(numbers)
        elif what in "CDG":
            row.column = {"C": row.column + min(count, 1000), "D": max(0, row.column - count), "G": count - 1}[what]
        elif self.area is not None and what in "AF":
            self.area.up(count)
        elif self.area is not None and what in "BE":
            self.area.down(min(count, MAX_ROWS))
        elif self.area is not None and what == "J":
            row.erase("")
            del self.area.rows[self.area.at + 1 :]
        if self.area is not None and what in "EF":
            self.area.row.column = 0
        self._touch()

    def _set_style(self, escape: str) -> None:
        found = _STYLE.fullmatch(escape)
        if found is None:
            return
        is_reset = not found[1].strip("0;")
        self._style = "" if is_reset else (self._style + escape)[-80:]


def _last_states(text: str) -> str:
    """The last state of each line, of lines that were rewritten very often."""
    found = []
    for line in text.split("\n"):
        states = [state for state in line.removesuffix("\r").split("\r") if state]
        found.append("\r" + states[-1] if len(states) > 1 else line)
    return "\n".join(found)


EVERY_S = 0.1

Source = tuple[int, str]  # rank and stream


@dataclass(eq=False)
class LiveBlock:
    """One place in the output with a line per rank. Equal lines are shown once."""

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

    @property
    def is_over(self) -> bool:
        return all(area.is_over for area in self.areas.values())

    def publish(self, display: Display) -> None:
        """Show it in a new place."""
        self.display_id = f"paceline-bars-{uuid4().hex}"
        self._shown, self.is_settled = "", False
        self.draw(display)

    def draw(self, display: Display) -> None:
        """Show what has changed, where it was published."""
        if not self.display_id or self.is_settled:
            return
        if any(area.changed for area in self.areas.values()) or not self._shown:
            text = self.text()
            if text and text != self._shown:
                self._shown = text
                display.live(self.display_id, text)
            for area in self.areas.values():
                area.changed = False
        if self.is_over:
            self.is_settled = True
            display.settle(self.display_id)


class LiveBlocks:
    """All blocks of a cell, and when they are drawn."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._blocks: list[LiveBlock] = []
        self._drawn_at = float("-inf")

    def open(self, areas: Iterable[tuple[Source, Area]]) -> LiveBlock | None:
        """Find a place for areas that begin together. Returns the block if it is a new one."""
        placed = dict(areas)
        newest = self._blocks[-1] if self._blocks else None
        if newest is not None and not newest.areas.keys() & placed.keys() and not newest.is_settled:
            newest.areas |= placed
            return None
        block = LiveBlock(placed)
        self._blocks.append(block)
        return block

    def drop(self, ranks: Iterable[int]) -> None:
        """Remove what these ranks have drawn."""
        gone = set(ranks)
        for block in self._blocks:
            block.areas = {source: area for source, area in block.areas.items() if source[0] not in gone}
        self._blocks = [block for block in self._blocks if block.areas]

    def draw(self, now: float) -> None:
        """Bring all blocks up to date, ten times a second at most; those whose bars are over at once, since the text
        that comes next goes below them."""
        is_due = now >= self._drawn_at + EVERY_S
        if is_due:
            self._drawn_at = now
        for block in self._blocks:
            if is_due or block.is_over:
                block.draw(self._display)
