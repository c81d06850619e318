"""The output of one cell that runs on several ranks."""

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from textwrap import wrap

from paceline.launch.lines import QUIET_S, Fold, name_ranks, spans
from paceline.notebook.events import Cleared, Died, Ended, Event, Failed, Noticed, Showed, Wrote
from paceline.notebook.page.bars import Board, Boards, Source
from paceline.notebook.page.overflow import Overflow
from paceline.notebook.page.screen import Area, Screen
from paceline.notebook.page.show import Show

BATCH_S = 0.05
NOTICE_WIDTH = 110  # pages break longer lines wherever they end
# A rank that raised is told of at once when others keep the cell going for longer than this.
TELL_S = 1.0
# What waits in the fold, beside lines of standard output (1) and error (2).
OUT, ERR, VALUE, RICH, UPDATE, BEGIN_OUT, BEGIN_ERR, CLEAR, CLEAR_LATER = range(1, 10)
_LINES = {"stdout": OUT, "stderr": ERR}
_BEGINS = {"stdout": BEGIN_OUT, "stderr": BEGIN_ERR}
_STREAMS = {OUT: "stdout", ERR: "stderr", VALUE: "stdout", BEGIN_OUT: "stdout", BEGIN_ERR: "stderr"}


@dataclass
class Item:
    """One thing that is on the page. What nobody but paceline says has no ranks."""

    ranks: tuple[int, ...]
    stream: str = ""
    text: str = ""
    rich: Showed | None = None
    display_id: str | None = None
    board: Board | None = None


class CellView:
    """Shows what ranks say: a gutter with their numbers, equal lines once, bars in place.

    The page is a list of items. When ranks clear their output, theirs are taken out and the rest is shown anew.
    """

    def __init__(self, ranks: Sequence[int], size: int, show: Show) -> None:
        self._ranks, self._size, self._show = tuple(ranks), size, show
        self._fold = Fold(self._let_out, len(self._ranks))
        self._screens: dict[Source, Screen] = {}
        self._written_at: dict[Source, float] = {}
        self._beginning: dict[Source, deque[Area]] = {}
        self._rich: dict[str, tuple[Showed, int]] = {}  # what waits in the fold, and how often
        self._boards = Boards(show)
        self._items: list[Item] = []
        self._published = 0
        self._published_at = float("-inf")
        self._replaced: dict[str, Item] = {}
        self._is_stale = False
        self._clears_next: set[int] = set()
        self._overflow = Overflow()
        self._raised: dict[int, tuple[float, str]] = {}
        self._running = set(self._ranks)

    def take(self, event: Event, now: float) -> None:
        """Take in what a rank says."""
        match event:
            case Wrote():
                self._write(event, now)
            case Showed():
                self._add_shown(event, now)
            case Cleared(rank, waits):
                for source, screen in self._screens.items():
                    if source[0] == rank:
                        screen.reset()
                self._fold.add(rank, "", now, CLEAR_LATER if waits else CLEAR)
            case Failed(rank, name, value):
                first = value.partition("\n")[0]
                self._raised[rank] = now, f"{name}: {first}" if first else name
            case Died(rank, how):
                self._running.discard(rank)
                self._say(f"rank {rank} {how}")
            case Ended(rank):
                self._running.discard(rank)
            case Noticed(text):
                self._say(text)
        self._publish(now)

    def tick(self, now: float) -> None:
        """Let out what has waited long enough."""
        for (rank, stream), screen in self._screens.items():
            if screen.has_partial and now > self._written_at[rank, stream] + QUIET_S:
                if self._show.replaces:
                    self._begin((rank, stream), screen.linger(), now)
                else:
                    self._add_lines(rank, stream, screen.rest(), now)
        self._tell_of_raised(now)
        self._fold.flush(now)
        self._boards.draw(now)
        self._publish(now)

    def close(self, now: float) -> None:
        """Show all that is held back. The cell is over."""
        for (rank, stream), screen in self._screens.items():
            self._add_lines(rank, stream, screen.rest(), now)
        self._fold.flush(float("inf"))
        self._clears_next.clear()
        for ranks, stream, text in self._overflow.last_lines():
            self._put_line(ranks, stream, text)
        self._publish(float("inf"))
        self._boards.draw(now, at_once=True)

    # What ranks say goes into the fold, in their order.

    def _write(self, event: Wrote, now: float) -> None:
        source = event.rank, event.stream
        screen = self._screens.setdefault(source, Screen())
        self._written_at[source] = now
        if self._overflow.is_full and self._overflow.takes(event, screen):
            return
        for part in screen.write(event.text):
            if isinstance(part, Area):
                self._begin(source, part, now)
            else:
                self._add_lines(event.rank, event.stream, [part], now)
        if self._overflow.has_read(len(event.text)):
            self._fold.flush(float("inf"))
            self._overflow.is_full = True

    def _add_lines(self, rank: int, stream: str, lines: Iterable[str], now: float) -> None:
        for line in lines:
            self._settle_bars(rank)
            self._fold.add(rank, line, now, _LINES[stream])

    def _begin(self, source: Source, area: Area, now: float) -> None:
        self._beginning.setdefault(source, deque()).append(area)
        self._fold.add(source[0], "", now, _BEGINS[source[1]])

    def _settle_bars(self, rank: int) -> None:
        """Bars that came to their end stay above what the rank says next; its next bar stands below.

        The end may come after the text, since the streams of a kernel are not kept in order.
        """
        for stream in _LINES:
            screen = self._screens.get((rank, stream))
            if screen is not None and screen.area is not None:
                screen.area.ends_with_bar = True
                if screen.area.at_rest:
                    screen.reset()

    def _add_shown(self, event: Showed, now: float) -> None:
        self._settle_bars(event.rank)
        plain = event.data.get("text/plain")
        is_text = isinstance(plain, str) and (not self._show.draws or event.data.keys() == {"text/plain"})
        if is_text and (event.display_id is None or not self._show.replaces):
            self._fold.add(event.rank, str(plain), now, VALUE)
        elif not self._show.draws:
            self._fold.add(event.rank, f"({', '.join(event.data)})", now, VALUE)
        else:
            # What has a name may be replaced by one rank alone, so it is that rank's alone.
            content = [event.data, event.metadata, [event.rank, event.display_id] if event.display_id else None]
            key = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
            self._rich[key] = event, self._rich.get(key, (event, 0))[1] + 1
            is_update = event.updates and event.display_id is not None and self._show.replaces
            self._fold.add(event.rank, key, now, UPDATE if is_update else RICH)

    # What comes out of the fold goes onto the page.

    def _let_out(self, ranks: tuple[int, ...], text: str, channel: int) -> None:
        if channel in (CLEAR, CLEAR_LATER):
            self._clears_next.update(ranks)
            if channel == CLEAR:
                self._clear(ranks)
            return
        if channel == UPDATE:
            self._replace(self._take_rich(text, 1))
            return
        self._clear([rank for rank in ranks if rank in self._clears_next])
        if channel in (BEGIN_OUT, BEGIN_ERR):
            sources = [(rank, _STREAMS[channel]) for rank in ranks]
            board = self._boards.open((source, self._beginning[source].popleft()) for source in sources)
            if board is not None:
                self._items.append(Item((), board=board))
        elif channel == RICH:
            self._put_rich(ranks, self._take_rich(text, len(ranks)))
        else:
            for line in text.split("\n"):
                shown = self._overflow.admit(ranks, _STREAMS[channel], line)
                if shown is not None:
                    self._put_line(ranks, _STREAMS[channel], shown)
            if self._overflow.has_just_filled():
                self._say(self._overflow.NOTE)

    def _take_rich(self, key: str, count: int) -> Showed:
        event, waiting = self._rich.pop(key)
        if waiting > count:
            self._rich[key] = event, waiting - count
        return event

    def _put_line(self, ranks: tuple[int, ...], stream: str, text: str) -> None:
        self._items.append(Item(ranks, stream, text))

    def _put_rich(self, ranks: tuple[int, ...], event: Showed) -> None:
        self._items.append(Item(ranks, rich=event, display_id=_page_id(event)))

    def _replace(self, event: Showed) -> None:
        """Also what an earlier cell has shown."""
        name = _page_id(event)
        assert name is not None
        self._replaced[name] = Item((event.rank,), rich=event, display_id=name)
        for number, item in enumerate(self._items):
            if item.display_id == name:
                self._items[number] = self._replaced[name]

    def _say(self, text: str) -> None:
        for line in wrap(f"paceline: {text}", NOTICE_WIDTH, subsequent_indent="  ", break_long_words=False):
            self._items.append(Item((), "stderr", line))

    def _tell_of_raised(self, now: float) -> None:
        for rank, (at, what) in list(self._raised.items()):
            others = self._running - self._raised.keys()
            if others and now > at + TELL_S:
                verb = "runs" if len(others) == 1 else "run"
                self._say(f"rank {rank} raised {what}; {name_ranks(others)} still {verb}")
                del self._raised[rank]

    def _clear(self, ranks: Iterable[int]) -> None:
        gone = set(ranks)
        self._clears_next -= gone
        if not gone or not self._show.replaces:
            return
        self._boards.drop(gone)
        kept = []
        for item in self._items:
            left = tuple(rank for rank in item.ranks if rank not in gone)
            if left or (item.board is not None and item.board.areas) or (item.text and not item.ranks):
                item.ranks = left
                kept.append(item)
        self._is_stale = self._is_stale or bool(self._published)
        self._items = kept

    def _publish(self, now: float) -> None:
        """Bring the page up to date, twenty times a second at most."""
        if now < self._published_at + BATCH_S:
            return
        if not self._is_stale and not self._replaced and self._published == len(self._items):
            return
        self._published_at = now
        if self._is_stale:
            self._show.clear(bool(self._items))
            self._published, self._is_stale = 0, False
        new = self._items[self._published :]
        self._published = len(self._items)
        for name, item in self._replaced.items():
            if not any(item is other for other in new):
                self._show.rich(*self._content(item), name, True)
        self._replaced.clear()
        self._boards.settle()
        self._publish_items(new)

    def _publish_items(self, items: Sequence[Item]) -> None:
        stream, lines = "", list[str]()
        for item in [*items, Item(())]:
            label = f"[{spans(item.ranks)}]" if item.ranks else ""
            has_label = bool(label) and len(self._ranks) > 1 and not self._is_text(item)
            name = item.stream or ("stdout" if item.rich is not None and has_label else "")
            if lines and name != stream:
                self._show.stream(stream, "".join(f"{line}\n" for line in lines))
                lines.clear()
            stream = name
            if item.stream:
                lines.append(self._with_gutter(item.ranks, item.text))
            elif item.rich is not None:
                if has_label:
                    self._show.stream("stdout", "".join(f"{line}\n" for line in [*lines, label]))
                    lines.clear()
                self._show.rich(*self._content(item), item.display_id, False)
            elif item.board is not None:
                item.board.publish(self._show)

    def _with_gutter(self, ranks: tuple[int, ...], text: str) -> str:
        if not ranks or self._size == 1:
            return text
        return f"[{spans(ranks)}] {text}" if text else f"[{spans(ranks)}]"

    def _is_text(self, item: Item) -> bool:
        return item.rich is not None and item.rich.data.keys() == {"text/plain"}

    def _content(self, item: Item) -> tuple[dict[str, object], dict[str, object]]:
        """The MIME types of a rich item. Text alone has its gutter inside, since only so it can be replaced with it."""
        assert item.rich is not None
        data = dict(item.rich.data)
        if self._is_text(item):
            lines = str(data["text/plain"]).split("\n")
            data["text/plain"] = "\n".join(self._with_gutter(item.ranks, line) for line in lines)
        return data, dict(item.rich.metadata)


def _page_id(event: Showed) -> str | None:
    return None if event.display_id is None else f"paceline-{event.rank}-{event.display_id}"
