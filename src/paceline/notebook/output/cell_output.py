"""The output of one cell that runs on several ranks."""

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from textwrap import wrap

from paceline.launch.lines import QUIET_S, Fold, name_ranks, spans
from paceline.memory_plan.numbers import show_bytes
from paceline.notebook.events import Cleared, Died, Ended, Event, Failed, Noticed, Showed, Wrote
from paceline.notebook.output.display import Display
from paceline.notebook.output.terminal import Area, LiveBlock, LiveBlocks, Source, TerminalEmulator

BATCH_S = 0.05
NOTICE_WIDTH = 110  # frontends break longer lines anywhere
# An error is reported at once if other ranks keep the cell running for longer than this.
REPORT_S = 1.0
MAX_SHOWN = 1 << 20
LAST_LINES = 30
MAX_LINE = 2000
OVERFLOW = "this cell has written more than 1 MiB: the rest is counted, and its last lines are shown when the cell ends"


# ---- items that wait for equal ones of other ranks


@dataclass(frozen=True, slots=True)
class _Text:
    """A line, or the several lines of a value."""

    stream: str
    text: str


@dataclass(frozen=True, slots=True)
class _Rich:
    """A figure or a table; equal ones have an equal `key`."""

    key: str
    event: Showed = field(compare=False)


@dataclass(frozen=True, slots=True)
class _LiveArea:
    """An area that is rewritten in place begins. Each rank has its own, in `CellOutput._beginning`."""

    stream: str


@dataclass(frozen=True, slots=True)
class _Clear:
    """The rank clears what it has shown; `waits` until it shows something new."""

    waits: bool


@dataclass
class OutputItem:
    """One shown item. paceline's own messages have no ranks."""

    ranks: tuple[int, ...]
    stream: str = ""
    text: str = ""
    rich: Showed | None = None
    block: LiveBlock | None = None

    @property
    def display_id(self) -> str | None:
        """The name under which it can be replaced."""
        rich = self.rich
        return None if rich is None or rich.display_id is None else f"paceline-{rich.rank}-{rich.display_id}"

    @property
    def is_text(self) -> bool:
        """Whether it is a display that holds nothing but text."""
        return self.rich is not None and self.rich.data.keys() == {"text/plain"}


@dataclass
class LeftOut:
    """Output of a rank beyond the cell's limit: the number of characters, and the last lines."""

    characters: int = 0
    last: deque[_Text] = field(default_factory=lambda: deque(maxlen=LAST_LINES))

    def add(self, stream: str, text: str) -> None:
        self.characters += len(text) + 1
        self.last.extend(_Text(stream, line[:MAX_LINE]) for line in text.split("\n")[-LAST_LINES:])


class CellOutput:
    """Shows the output of ranks: a gutter with their numbers, equal lines once, bars in place.

    The output is a list of items. When ranks clear their output, their items are removed and the rest is shown again.
    """

    def __init__(self, ranks: Sequence[int], size: int, display: Display) -> None:
        self._ranks, self._size, self._display = tuple(ranks), size, display
        self._fold = Fold[_Text | _Rich | _LiveArea | _Clear](self._release, len(self._ranks))
        self._emulators: dict[Source, TerminalEmulator] = {}
        self._beginning: dict[Source, deque[Area]] = {}
        self._blocks = LiveBlocks(display)
        self._items: list[OutputItem] = []
        self._published = 0
        self._published_at = float("-inf")
        self._replaced: dict[str, OutputItem] = {}
        self._is_stale = False
        self._clears_next: set[int] = set()
        self._room = MAX_SHOWN
        self._left_out: dict[int, LeftOut] = defaultdict(LeftOut)
        self._raised: dict[int, tuple[float, str]] = {}
        self._running = set(self._ranks)

    def take(self, event: Event, now: float) -> None:
        """Take in an event of a rank."""
        match event:
            case Wrote():
                self._write(event, now)
            case Showed():
                self._add_shown(event, now)
            case Cleared(rank, waits):
                for source, emulator in self._emulators.items():
                    if source[0] == rank:
                        emulator.reset()
                self._fold.add(rank, _Clear(waits), now)
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
        """Show items that have waited long enough."""
        for (rank, stream), emulator in self._emulators.items():
            if emulator.has_partial and now > emulator.written_at + QUIET_S:
                if self._display.replaces:
                    self._begin((rank, stream), emulator.linger(), now)
                else:
                    self._write_rest(rank, stream, emulator, now)
        self._report_raised(now)
        self._fold.flush(now)
        self._blocks.draw(now)
        self._publish(now)

    def close(self, now: float) -> None:
        """The cell is over: show everything that is still held back."""
        for (rank, stream), emulator in self._emulators.items():
            self._write_rest(rank, stream, emulator, now)
        self._fold.flush(float("inf"))
        self._clears_next.clear()
        self._add_last_lines()
        self._publish(float("inf"))
        self._blocks.draw(float("inf"))

    # ---- ranks' output enters the fold in order

    def _write(self, event: Wrote, now: float) -> None:
        source = event.rank, event.stream
        emulator = self._emulators.setdefault(source, TerminalEmulator())
        for part in emulator.write(event.text, now):
            if isinstance(part, Area):
                self._begin(source, part, now)
            else:
                self._add_text(event.rank, event.stream, part, now)

    def _write_rest(self, rank: int, stream: str, emulator: TerminalEmulator, now: float) -> None:
        if line := emulator.rest():
            self._add_text(rank, stream, line, now)

    def _add_text(self, rank: int, stream: str, text: str, now: float) -> None:
        self._settle_bars(rank)
        if self._room > 0:
            more = len(text) - MAX_SHOWN
            shown = text if more <= 0 else f"{text[:MAX_SHOWN]}… ({show_bytes(more)} of this line left out)"
            self._fold.add(rank, _Text(stream, shown), now)
            return
        if not self._left_out:
            self._fold.flush(float("inf"))
            self._say(OVERFLOW)
        self._left_out[rank].add(stream, text)

    def _begin(self, source: Source, area: Area, now: float) -> None:
        self._beginning.setdefault(source, deque()).append(area)
        self._fold.add(source[0], _LiveArea(source[1]), now)

    def _settle_bars(self, rank: int) -> None:
        """Bars that are finished stay above what the rank writes next; its next bar goes below.

        Their last update may come after the text, since the streams of a kernel are not kept in order.
        """
        for stream in ("stdout", "stderr"):
            emulator = self._emulators.get((rank, stream))
            if emulator is not None and emulator.area is not None:
                emulator.area.ends_with_bar = True
                if emulator.area.at_rest:
                    emulator.reset()

    def _add_shown(self, event: Showed, now: float) -> None:
        plain = event.data.get("text/plain")
        is_text = isinstance(plain, str) and (not self._display.draws or event.data.keys() == {"text/plain"})
        if is_text and (event.display_id is None or not self._display.replaces):
            self._add_text(event.rank, "stdout", str(plain), now)
        elif not self._display.draws:
            self._add_text(event.rank, "stdout", f"({', '.join(event.data)})", now)
        else:
            self._settle_bars(event.rank)
            # An item with a display id may be replaced by one rank only, so it is not folded with others.
            content = [event.data, event.metadata, [event.rank, event.display_id] if event.display_id else None]
            self._fold.add(event.rank, _Rich(json.dumps(content, sort_keys=True, default=str), event), now)

    # ---- folded items are shown

    def _release(self, ranks: tuple[int, ...], folded: _Text | _Rich | _LiveArea | _Clear) -> None:
        if isinstance(folded, _Clear):
            self._clears_next.update(ranks)
            if not folded.waits:
                self._clear(ranks)
            return
        if isinstance(folded, _Rich) and folded.event.updates and folded.event.display_id and self._display.replaces:
            self._replace(OutputItem(ranks, rich=folded.event))
            return
        self._clear([rank for rank in ranks if rank in self._clears_next])
        match folded:
            case _LiveArea(stream):
                sources = [(rank, stream) for rank in ranks]
                block = self._blocks.open((source, self._beginning[source].popleft()) for source in sources)
                if block is not None:
                    self._items.append(OutputItem((), block=block))
            case _Rich(event=event):
                item = OutputItem(ranks, rich=event)
                if len(self._ranks) > 1 and not item.is_text:
                    self._items.append(OutputItem(ranks, "stdout"))  # the gutter above it
                self._items.append(item)
            case _Text(stream, text):
                self._room -= len(text) + 1
                self._items += [OutputItem(ranks, stream, line) for line in text.split("\n")]

    def _replace(self, new: OutputItem) -> None:
        """Replace an item of this or an earlier cell."""
        assert new.display_id is not None
        self._replaced[new.display_id] = new
        self._items = [new if item.display_id == new.display_id else item for item in self._items]

    def _add_last_lines(self) -> None:
        """For a cell that wrote too much: report how much is missing, and show the last lines, equal ones folded."""
        if not self._left_out:
            return
        found: list[OutputItem] = []
        fold = Fold[_Text](
            lambda ranks, line: found.append(OutputItem(ranks, line.stream, line.text)), len(self._left_out) + 1
        )
        for rank, rest in self._left_out.items():
            for line in rest.last:
                fold.add(rank, line, 0.0)
        fold.flush(float("inf"))
        last = found[-LAST_LINES:]
        characters = sum(rest.characters for rest in self._left_out.values())
        self._say(f"{show_bytes(characters)} left out here; the last {len(last)} lines:")
        self._items += last

    def _say(self, text: str) -> None:
        for line in wrap(f"paceline: {text}", NOTICE_WIDTH, subsequent_indent="  ", break_long_words=False):
            self._items.append(OutputItem((), "stderr", line))

    def _report_raised(self, now: float) -> None:
        for rank, (at, what) in list(self._raised.items()):
            others = self._running - self._raised.keys()
            if others and now > at + REPORT_S:
                verb = "runs" if len(others) == 1 else "run"
                self._say(f"rank {rank} raised {what}; {name_ranks(others)} still {verb}")
                del self._raised[rank]

    def _clear(self, ranks: Iterable[int]) -> None:
        gone = set(ranks)
        self._clears_next -= gone
        if not gone or not self._display.replaces:
            return
        self._blocks.drop(gone)
        kept = []
        for item in self._items:
            left = tuple(rank for rank in item.ranks if rank not in gone)
            if left or (item.block is not None and item.block.areas) or (item.text and not item.ranks):
                item.ranks = left
                kept.append(item)
        self._is_stale = self._is_stale or bool(self._published)
        self._items = kept

    def _publish(self, now: float) -> None:
        """Bring the display up to date, twenty times a second at most."""
        if now < self._published_at + BATCH_S:
            return
        if not self._is_stale and not self._replaced and self._published == len(self._items):
            return
        self._published_at = now
        if self._is_stale:
            self._display.clear(bool(self._items))
            self._published, self._is_stale = 0, False
        new = self._items[self._published :]
        self._published = len(self._items)
        for name, item in self._replaced.items():
            if not any(item is other for other in new):
                self._display.rich(*self._content(item), name, True)
        self._replaced.clear()
        self._blocks.draw(now)
        self._publish_items(new)

    def _publish_items(self, items: Sequence[OutputItem]) -> None:
        for stream, run in groupby(items, key=lambda item: item.stream):
            if stream:
                lines = [self._with_gutter(item.ranks, item.text) for item in run]
                self._display.stream(stream, "".join(f"{line}\n" for line in lines))
                continue
            for item in run:
                if item.rich is not None:
                    self._display.rich(*self._content(item), item.display_id, False)
                elif item.block is not None:
                    item.block.publish(self._display)

    def _with_gutter(self, ranks: tuple[int, ...], text: str) -> str:
        if not ranks or self._size == 1:
            return text
        return f"[{spans(ranks)}] {text}" if text else f"[{spans(ranks)}]"

    def _content(self, item: OutputItem) -> tuple[dict[str, object], dict[str, object]]:
        """The MIME types of a rich item. Text alone has its gutter inside, so that both are replaced together."""
        assert item.rich is not None
        data = dict(item.rich.data)
        if item.is_text:
            lines = str(data["text/plain"]).split("\n")
            data["text/plain"] = "\n".join(self._with_gutter(item.ranks, line) for line in lines)
        return data, dict(item.rich.metadata)
