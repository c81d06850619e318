"""What a cell shows of several ranks: on a page that remembers, in a real kernel, and on a real terminal."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from paceline.notebook.events import Cleared, Died, Ended, Event, Failed, Noticed, Showed, Wrote
from paceline.notebook.output.cell_output import CellOutput
from paceline.notebook.output.terminal import Area, TerminalEmulator
from tests.notebook.kernel_cells import run_cells

PNG = {"image/png": "iVBORw0KGgo=", "text/plain": "<Figure>"}


class Page:
    """A notebook's page: what a reader sees at any time, as the messages say."""

    def __init__(self, *, draws: bool = True, replaces: bool = True) -> None:
        self.draws, self.replaces = draws, replaces
        self.shown: list[list[Any]] = []  # kind, what, display id
        self.calls = 0
        self._clears_next = False

    def stream(self, name: str, text: str) -> None:
        assert text.endswith("\n")
        self._put(name, text, None)

    def rich(self, data: Mapping[str, Any], metadata: Mapping[str, Any], display_id: str | None, update: bool) -> None:
        if not update:
            self._put("rich", dict(data), display_id)
            return
        for entry in self.shown:
            if entry[2] == display_id:
                entry[1] = dict(data)
        self.calls += 1

    def live(self, display_id: str, text: str) -> None:
        self.calls += 1
        known = [entry for entry in self.shown if entry[2] == display_id]
        for entry in known:
            entry[1] = text
        if not known:
            self._put("live", text, display_id)

    def settle(self, display_id: str) -> None:
        assert any(entry[2] == display_id for entry in self.shown)

    def clear(self, waits: bool) -> None:
        self._clears_next = waits
        if not waits:
            self.shown.clear()

    def _put(self, kind: str, what: object, display_id: str | None) -> None:
        self.calls += 1
        if self._clears_next:
            self.shown.clear()
            self._clears_next = False
        last = self.shown[-1] if self.shown else None
        if last is not None and kind == last[0] and kind.startswith("std"):
            last[1] += what
        else:
            self.shown.append([kind, what, display_id])

    def seen(self) -> list[tuple[str, Any]]:
        return [(kind, what) for kind, what, _ in self.shown]


class Cell:
    """A view with a clock."""

    def __init__(self, ranks: int | list[int] = 2, size: int | None = None, page: Page | None = None) -> None:
        which = list(range(ranks)) if isinstance(ranks, int) else ranks
        self.page = page or Page()
        self.view = CellOutput(which, size or len(which), self.page)
        self.now = 0.0

    def take(self, *events: Event) -> None:
        for event in events:
            self.view.take(event, self.now)

    def out(self, rank: int, text: str) -> None:
        self.take(Wrote(rank, "stdout", text))

    def err(self, rank: int, text: str) -> None:
        self.take(Wrote(rank, "stderr", text))

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            self.view.tick(self.now)

    def close(self) -> list[tuple[str, Any]]:
        self.view.close(self.now)
        return self.page.seen()


def test_equal_lines_are_one_and_others_have_their_rank() -> None:
    cell = Cell()
    for rank in range(2):
        cell.out(rank, f"same\nrank {rank}\n\n")
    assert cell.close() == [("stdout", "[0-1] same\n[0] rank 0\n[1] rank 1\n[0-1]\n")]


def test_what_waits_for_equal_lines_comes_out_soon() -> None:
    cell = Cell()
    cell.out(0, "only here\n")
    assert cell.page.seen() == []
    cell.wait(0.2)
    assert cell.page.seen() == [("stdout", "[0] only here\n")]


def test_standard_error_is_shown_as_such_and_in_order() -> None:
    cell = Cell()
    for rank in range(2):
        cell.out(rank, "one\n")
        cell.err(rank, "two\n")
        cell.out(rank, "three\n")
    assert cell.close() == [("stdout", "[0-1] one\n"), ("stderr", "[0-1] two\n"), ("stdout", "[0-1] three\n")]


def test_parts_of_a_line_are_put_together() -> None:
    cell = Cell()
    for text in ("a", "b\r", "\nc", "\x1b[3", "1mred\x1b[0m", "\n", "end  \n", "rest"):
        cell.out(0, text)
        cell.out(1, text)
    assert cell.close() == [("stdout", "[0-1] ab\n[0-1] c\x1b[31mred\x1b[0m\n[0-1] end  \n[0-1] rest\n")]


def test_a_world_of_one_has_no_gutter_and_one_rank_of_many_has() -> None:
    cell = Cell(1)
    cell.out(0, "text\n")
    assert cell.close() == [("stdout", "text\n")]
    cell = Cell([1], size=2)
    cell.out(1, "text\n")
    cell.take(Showed(1, PNG, {}))
    assert cell.close() == [("stdout", "[1] text\n"), ("rich", PNG)]


def test_text_is_published_in_batches() -> None:
    cell = Cell()
    for number in range(1000):
        cell.now = number / 1000
        for rank in range(2):
            cell.out(rank, f"line {number}\n")
    cell.close()
    assert cell.page.calls <= 22
    assert cell.page.seen()[0][1].count("\n") == 1000


# ---- bars


class ToCell:
    """A file that tqdm writes to: standard error of a rank."""

    def __init__(self, cell: Cell, rank: int) -> None:
        self.cell, self.rank = cell, rank

    def write(self, text: str) -> None:
        self.cell.err(self.rank, text)

    def flush(self) -> None:
        pass


def loop(cell: Cell, rank: int, kind: str) -> Iterator[None]:
    """A rank's loop with tqdm, step by step. tqdm counts bars of one process, so each is told its position here."""

    def bar(count: int, text: str, position: int = 0) -> Iterator[int]:
        tqdm = pytest.importorskip("tqdm").tqdm
        looks = {"ascii": True, "ncols": 60, "bar_format": "{desc}{n_fmt}/{total_fmt}|{bar}|"}
        options = {"file": ToCell(cell, rank), "mininterval": 0, "leave": not position, "position": position, **looks}
        found: Iterator[int] = iter(tqdm(range(count), desc=text, **options))
        return found

    if kind == "one":
        for _ in bar(4, f"r{rank} "):
            yield
    elif kind == "nested":
        for epoch in bar(2, "epochs "):
            for _ in bar(3, f"r{rank}e{epoch} ", 1):
                yield
    else:
        for epoch in range(2):
            for _ in bar(3, f"r{rank}e{epoch} "):
                yield
            cell.out(rank, f"loss {epoch}\n")


def bars(cell: Cell, ranks: int, kind: str) -> Iterator[None]:
    """All ranks side by side."""
    loops = [loop(cell, rank, kind) for rank in range(ranks)]
    while [one for one in loops if next(one, "end") != "end"]:
        yield


@pytest.fixture(autouse=True)
def no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """tqdm starts a thread that looks after slow bars, and never ends it."""
    monkeypatch.setattr(pytest.importorskip("tqdm").tqdm, "monitor_interval", 0)


def test_bars_of_two_ranks_are_two_lines_in_one_place() -> None:
    cell = Cell()
    states = []
    for _ in bars(cell, 2, "one"):
        cell.wait(0.2)
        states.append([what for kind, what in cell.page.seen() if kind == "live"])
    assert all(len(state) == 1 for state in states)
    assert [state[0].split("|")[0] for state in states] == ["[0] r0 0/4", "[0] r0 1/4", "[0] r0 2/4", "[0] r0 3/4"]
    ((kind, text),) = cell.close()
    assert kind == "live"
    first, second = text.split("\n")
    assert first.startswith("[0] r0 4/4|####")
    assert second.startswith("[1] r1 4/4|####")


def test_equal_bars_are_one_line() -> None:
    cell = Cell(3)
    for percent in (0, 50, 100):
        for rank in range(3):
            cell.err(rank, f"\r{percent:3}%")
        cell.wait(0.2)
        assert cell.page.seen() == [("live", f"[0-2] {percent:3}%")]
    cell.err(1, "\r 99%")
    cell.wait(0.2)
    assert cell.page.seen() == [("live", "[0,2] 100%\n[1]    99%")]


def test_nested_bars_stay_in_their_lines() -> None:
    cell = Cell()
    most = 0
    for _ in bars(cell, 2, "nested"):
        cell.wait(0.2)
        ((kind, text),) = cell.page.seen()
        most = max(most, text.count("\n") + 1)
    assert most == 3
    ((kind, text),) = cell.close()
    assert kind == "live"
    assert text.startswith("[0-1] epochs 2/2|")
    assert "\n" not in text


def test_bars_and_lines_stand_in_the_order_of_the_rank() -> None:
    cell = Cell()
    for _ in bars(cell, 2, "epochs"):
        cell.wait(0.2)
    seen = cell.close()
    assert [kind for kind, _ in seen] == ["live", "stdout", "live", "stdout"]
    assert [what for kind, what in seen if kind == "stdout"] == ["[0-1] loss 0\n", "[0-1] loss 1\n"]
    assert "[0] r0e0 3/3" in seen[0][1] and "[1] r1e0 3/3" in seen[0][1]
    assert "[0] r0e1 3/3" in seen[2][1] and "[1] r1e1 3/3" in seen[2][1]


def test_the_end_of_a_bar_may_come_after_the_text() -> None:
    cell = Cell(1)
    for text in ("\r 50%", "loss\n", "\r100%\n\r  0%", "\r 10%"):
        cell.take(Wrote(0, "stdout" if "loss" in text else "stderr", text))
        cell.wait(0.2)
    assert cell.close() == [("live", "[0] 100%"), ("stdout", "loss\n"), ("live", "[0]  10%")]


def test_nested_bars_of_the_next_epoch_stand_below_the_text() -> None:
    cell = Cell(1)
    for epoch in range(2):
        cell.err(0, f"\r{epoch}: 0/1")
        cell.err(0, "\n\rbatches 0/9\x1b[A")
        cell.err(0, "\n\r           \x1b[A")
        cell.err(0, f"\r{epoch}: 1/1\n")
        cell.out(0, "loss\n")
        cell.wait(0.2)
    assert cell.close() == [("live", "[0] 0: 1/1"), ("stdout", "loss\n"), ("live", "[0] 1: 1/1"), ("stdout", "loss\n")]


def test_text_does_not_part_nested_bars() -> None:
    cell = Cell(1)
    cell.err(0, "\repochs 1/5")
    cell.out(0, "epoch\n")
    for text in ("\n\rbatches 0/9", "\x1b[A", "\repochs 2/5", "\n\rbatches 7/9\x1b[A"):
        cell.err(0, text)
        cell.wait(0.2)
    assert cell.close() == [("live", "[0] epochs 2/5\n[0] batches 7/9"), ("stdout", "epoch\n")]


def test_text_before_a_bar_stands_above_it() -> None:
    cell = Cell()
    cell.out(0, "begin\n")
    cell.err(0, "\r 10%")
    cell.wait(0.2)
    assert cell.page.seen() == [("stdout", "[0] begin\n"), ("live", "[0]  10%")]
    cell.out(0, "while it goes on\n")
    cell.err(0, "\r 20%")
    cell.wait(0.3)
    assert cell.page.seen()[1:] == [("live", "[0]  20%"), ("stdout", "[0] while it goes on\n")]


def test_bars_are_drawn_ten_times_a_second_at_most() -> None:
    cell = Cell()
    for number in range(1000):
        cell.now = number / 1000
        cell.err(0, f"\r{number}")
        cell.view.tick(cell.now)
    assert 5 <= cell.page.calls <= 12
    assert cell.close() == [("live", "[0] 999")]


def test_a_thousand_bars_are_not_one_display() -> None:
    cell = Cell(1)
    for number in range(100):
        cell.err(0, f"\r{number} begins\r{number} ended \n")
        cell.wait(0.1)
    seen = cell.close()
    assert "\n".join(what for _, what in seen).split("\n") == [f"[0] {number} ended" for number in range(100)]
    assert 6 <= len(seen) <= 10


def test_dots_that_grow_are_seen_growing() -> None:
    cell = Cell()
    for count in range(1, 4):
        cell.out(0, ".")
        cell.wait(0.7)
        assert cell.page.seen() == [("live", "[0] " + "." * count)]
    cell.out(0, " done\nnext\n")
    assert cell.close() == [("live", "[0] ... done"), ("stdout", "[0] next\n")]


def test_a_page_that_cannot_replace_gets_lines() -> None:
    cell = Cell(page=Page(draws=False, replaces=False))
    cell.out(0, "without an end")
    cell.wait(0.7)
    assert cell.page.seen() == [("stdout", "[0] without an end\n")]
    cell.take(Showed(0, PNG, {}), Showed(1, {"image/png": "x"}, {}), Cleared(0, False))
    cell.take(
        Showed(0, {"text/plain": "1"}, {}, display_id="a"),
        Showed(0, {"text/plain": "2"}, {}, display_id="a", updates=True),
    )
    assert cell.close() == [("stdout", "[0] without an end\n[0] <Figure>\n[0] 1\n[0] 2\n[1] (image/png)\n")]


# ---- what a terminal does with text


def screen_lines(*texts: str) -> list[str]:
    """All lines that are over, then those of the last area."""
    screen, lines = TerminalEmulator(), []
    for text in texts:
        lines += [part for part in screen.write(text, 0.0) if not isinstance(part, Area)]
    return [*lines, *(screen.area.lines() if screen.area else filter(None, [screen.rest()]))]


@pytest.mark.parametrize(
    ("texts", "lines"),
    [
        (("one\r", "\ntwo\r\n"), ["one", "two"]),
        (("long text\rshort", "\r         \rx"), ["x"]),
        (("abc\b\bX",), ["aXc"]),
        (("abc\rX\x1b[K",), ["X"]),
        (("\x1b[2Kabc\r\x1b[2Kd",), ["d"]),
        (("\rone\n\rtwo\x1b[A\rONE",), ["ONE", "two"]),
        (("\rone\n\rtwo\x1b[1", "A\rONE\x1b[J"), ["ONE"]),
        (("\r\x1b[32mgreen\x1b[0m rest",), ["\x1b[32mgreen\x1b[0m rest"]),
        (("\x1b[?25l\rhidden cursor\x1b[?25h",), ["hidden cursor"]),
        (("\x1b[31mred\x1b[0m line\n",), ["\x1b[31mred\x1b[0m line"]),
        (("\x1b]8;;http://x\x07link\x1b]8;;\x07\r!",), ["!ink"]),
        (("\rab\x1b[3Cd",), ["ab   d"]),
        (("no end",), ["no end"]),
        (("\x1b[5A up from nothing\n",), [" up from nothing"]),
    ],
)
def test_a_screen_reads_as_a_terminal(texts: tuple[str, ...], lines: list[str]) -> None:
    assert screen_lines(*texts) == lines
    whole = "".join(texts)
    assert screen_lines(*whole) == lines  # character by character
    assert screen_lines(whole) == lines


# ---- figures and tables


def test_results_that_are_text_are_lines() -> None:
    cell = Cell()
    for rank in range(2):
        cell.take(Showed(rank, {"text/plain": "tensor([1,\n        2])"}, {}))
        cell.take(Showed(rank, {"text/plain": f"{rank},\n{rank}"}, {}))
    assert cell.close() == [("stdout", "[0-1] tensor([1,\n[0-1]         2])\n[0] 0,\n[0] 0\n[1] 1,\n[1] 1\n")]


def test_equal_figures_are_one_and_each_has_its_ranks_above() -> None:
    cell = Cell()
    html = {"text/html": "<b>x</b>", "text/plain": "x"}
    for rank in range(2):
        cell.out(rank, "figure:\n")
        cell.take(Showed(rank, PNG, {}), Showed(rank, {**html, "text/plain": str(rank)}, {"text/html": {"a": 1}}))
    seen = cell.close()
    assert seen == [
        ("stdout", "[0-1] figure:\n[0-1]\n"),
        ("rich", PNG),
        ("stdout", "[0]\n"),
        ("rich", {**html, "text/plain": "0"}),
        ("stdout", "[1]\n"),
        ("rich", {**html, "text/plain": "1"}),
    ]


def test_a_display_is_updated_by_its_rank_alone() -> None:
    cell = Cell()
    for rank in range(2):
        cell.take(Showed(rank, {"text/plain": "begin"}, {}, display_id="a"))
        cell.take(Showed(rank, PNG, {}, display_id="b"))
    cell.wait(0.2)
    cell.take(Showed(1, {"text/plain": "new"}, {}, display_id="a", updates=True))
    cell.take(Showed(0, {"image/png": "new"}, {}, display_id="b", updates=True))
    cell.wait(0.2)
    rich = [what for kind, what in cell.close() if kind == "rich"]
    assert {"text/plain": "[0] begin"} in rich and {"text/plain": "[1] new"} in rich
    assert {"image/png": "new"} in rich and PNG in rich
    assert len(rich) == 4


def test_an_update_reaches_what_an_earlier_cell_has_shown() -> None:
    first = Cell()
    first.take(Showed(0, PNG, {}, display_id="a"))
    first.close()
    second = Cell(page=first.page)
    second.take(Showed(0, {"image/png": "later"}, {}, display_id="a", updates=True))
    assert ("rich", {"image/png": "later"}) in second.close()


# ---- clear_output


def test_a_rank_clears_only_its_own() -> None:
    cell = Cell()
    cell.out(0, "zero\nboth\n")
    cell.out(1, "one\nboth\n")
    cell.err(1, "\r 10%")
    cell.err(0, "\r 20%")
    cell.take(Noticed("something"))
    cell.wait(0.2)
    assert cell.page.seen()[-1] == ("live", "[0]  20%\n[1]  10%")
    cell.take(Cleared(0, False))
    cell.wait(0.2)
    assert cell.page.seen() == [
        ("stderr", "paceline: something\n"),
        ("stdout", "[1] one\n[1] both\n"),
        ("live", "[1]  10%"),
    ]
    cell.err(1, "\r 30%")
    cell.out(0, "again\n")
    assert cell.close()[-2:] == [("live", "[1]  30%"), ("stdout", "[0] again\n")]


def test_a_clear_may_wait_for_what_comes_next() -> None:
    cell = Cell(1)
    for number in range(3):
        cell.take(Cleared(0, True), Showed(0, {"image/png": str(number)}, {}))
        cell.wait(0.2)
        assert cell.page.seen() == [("rich", {"image/png": str(number)})]
    cell.take(Cleared(0, True))
    assert cell.close() == [("rich", {"image/png": "2"})]


def test_all_is_cleared_when_all_ranks_clear() -> None:
    cell = Cell()
    for rank in range(2):
        cell.out(rank, "text\n")
    cell.wait(0.2)
    for rank in range(2):
        cell.take(Cleared(rank, False))
    assert cell.close() == []


# ---- very much


def test_more_than_a_mebibyte_is_counted_and_its_end_shown() -> None:
    cell = Cell()
    for number in range(1300):
        for rank in range(2):
            cell.out(rank, "".join(f"line {number * 100 + one:06} {'x' * 60}\n" for one in range(100)))
        cell.wait(0.05)
    cell.out(0, "the very end")
    text = "".join(what for _, what in cell.close())
    assert len(text) < 1.15 * (1 << 20)
    notes = [what for kind, what in cell.page.seen() if kind == "stderr"]
    assert notes[0].startswith("paceline: this cell has written more than 1 MiB")
    assert "MiB left out here; the last 30 lines:" in "".join(notes)
    last = text.rstrip("\n").split("\n")[-30:]
    assert last[-1] == "[0] the very end"
    assert last[-2].startswith("[0-1] line 129999 xxx")
    assert last[0].startswith("[0-1] line 129971 xxx")


def test_a_bar_lives_on_after_very_much_text() -> None:
    cell = Cell(1)
    cell.out(0, "x" * 99 + "\n" * 1)
    cell.err(0, "\r 10%")
    cell.wait(0.2)
    for _ in range(20):
        cell.out(0, ("x" * 99 + "\n") * 1000)
    cell.err(0, "\r 20%")
    cell.wait(0.2)
    assert ("live", "[0]  20%") in cell.page.seen() or ("live", " 20%") in cell.page.seen()


def test_one_very_long_line_is_cut() -> None:
    cell = Cell()
    cell.out(0, "z" * 10_000_000)
    cell.take(Showed(1, {"text/plain": "q" * 3_000_000}, {}))
    seen = cell.close()
    assert sum(len(what) for _, what in seen) < 2.1 * (1 << 20)
    assert any("of this line left out" in what for _, what in seen)


# ---- what paceline says itself


def test_deaths_and_notices_come_at_once() -> None:
    cell = Cell()
    cell.take(Died(1, "was killed by SIGKILL", ("words",)), Ended(1))
    assert cell.page.seen() == [("stderr", "paceline: rank 1 was killed by SIGKILL\n")]
    cell.wait(0.1)
    cell.take(Noticed("rank 0 waits"))
    assert cell.page.seen()[-1][1].endswith("paceline: rank 0 waits\n")


def test_an_error_is_told_early_when_others_go_on() -> None:
    cell = Cell(3)
    cell.take(Failed(1, "ValueError", "bad\nworse", ()), Ended(1))
    cell.wait(0.9)
    assert cell.page.seen() == []
    cell.wait(0.4)
    assert cell.page.seen() == [("stderr", "paceline: rank 1 raised ValueError: bad; ranks 0,2 still run\n")]
    cell.wait(2)
    assert len(cell.page.seen()) == 1
    cell = Cell(2)
    cell.take(Failed(1, "ValueError", "bad", ()), Ended(1), Ended(0))
    cell.wait(2)
    assert cell.close() == []


# ---- the real thing

REAL = """
import time
from paceline.notebook.events import *
from paceline.notebook.output.cell_output import CellOutput
from paceline.notebook.output.display import IPythonDisplay
def cell(*events):
    view = CellOutput([0, 1], 2, IPythonDisplay())
    for event in events:
        if isinstance(event, float):
            end = time.monotonic() + event
            while time.monotonic() < end:
                time.sleep(0.02)
                view.tick(time.monotonic())
        else:
            for one in (event if isinstance(event, list) else [event]):
                view.take(one, time.monotonic())
    view.close(time.monotonic())
both = lambda stream, text: [Wrote(rank, stream, text) for rank in range(2)]
"""
BARS = r"""
cell(
    both("stdout", "begin\n"), both("stderr", "\r 10%"), 0.25, Wrote(0, "stderr", "\r 20%"), 0.25,
    both("stderr", "\r100%\n"), both("stdout", "end\n"),
)
"""
FIGURES = r"""
cell(
    Showed(0, {"image/png": "aaaa", "text/plain": "F"}, {}, display_id="d"), 0.2,
    Showed(0, {"image/png": "bbbb"}, {}, display_id="d", updates=True), Wrote(1, "stderr", "red\n"),
)
"""
CLEARS = r"""
cell(
    Wrote(0, "stdout", "gone\n"), 0.2, Cleared(0, True), Wrote(0, "stdout", "new\n"), Wrote(1, "stdout", "kept\n")
)
"""
MIXED = r"""
cell(
    Showed(0, {"image/png": "aaaa", "text/plain": "F"}, {}), Wrote(1, "stderr", "\r5"), 0.2,
    Wrote(0, "stdout", "above\n"), 0.2, Wrote(1, "stderr", "\r6"),
)
"""
SHELL = "from IPython.core.interactiveshell import InteractiveShell\nInteractiveShell.instance()\n"


def test_a_real_kernel_publishes_it() -> None:
    captured = f"%%capture seen\n{BARS}"
    _, drawn, rich, cleared, _, inside = run_cells(
        [REAL, BARS, FIGURES, CLEARS, captured, "print(repr(seen.stdout), len(seen.outputs))"]
    )
    live = [message for message in drawn if message["kind"].endswith("display_data")]
    assert [message["kind"] for message in live] == ["display_data"] + ["update_display_data"] * (len(live) - 1)
    assert len({message["transient"]["display_id"] for message in live}) == 1
    assert [message["data"]["text/plain"] for message in live] == ["[0-1]  10%", "[0]  20%\n[1]  10%", "[0-1] 100%"]
    assert [message["text"] for message in drawn if message["kind"] == "stream"] == ["[0-1] begin\n", "[0-1] end\n"]
    kinds = [message["kind"] for message in rich]
    assert kinds[:3] == ["stream", "display_data", "update_display_data"]
    assert rich[1]["transient"] == rich[2]["transient"] == {"display_id": "paceline-0-d"}
    assert {"kind": "stream", "name": "stderr", "text": "[1] red\n"} in rich
    after = cleared[[message["kind"] for message in cleared].index("clear_output") :]
    assert after[0]["wait"] is True
    assert "".join(message.get("text", "") for message in after) == "[0] new\n[1] kept\n"
    assert inside[0]["text"] == repr("[0-1] begin\n[0-1] 100%\n[0-1] end\n") + " 0\n"


def terminal(text: str) -> list[str]:
    """What stands on a terminal in the end, if only these ways to move the cursor are used."""
    rows, at = [""], 0
    for up, other in re.findall(r"\x1b\[(\d+)A\r\x1b\[J|([^\x1b]+)", text):
        if up:
            at -= int(up)
            del rows[at:]
            rows.append("")
        for number, line in enumerate(other.split("\n")):
            if number:
                rows.append("")
                at += 1
            rows[at] += line
    return [row for row in rows if row]


def test_a_real_terminal_shows_bars_below_the_text() -> None:
    script = f"{SHELL}{REAL}{BARS}{MIXED}"
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80"}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    written = b""
    try:
        while chunk := os.read(ours, 4096):
            written += chunk
    except OSError:  # the other end has gone
        assert process.wait(30) == 0, written.decode()
    finally:
        os.close(ours)
    text = written.decode().replace("\r\n", "\n")
    assert "[0]  20%\n[1]  10%\n" in text  # a state in between
    assert terminal(text) == [
        "[0-1] begin",
        "[0-1] 100%",
        "[0-1] end",
        "[0] F",
        "[0] above",
        "[1] 6",
    ]
