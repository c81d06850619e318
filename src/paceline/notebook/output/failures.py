"""Errors of several ranks as one exception: each distinct error once, with its ranks."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from paceline.errors import PacelineError
from paceline.launch.failure import names_a_peer_failure
from paceline.launch.lines import name_ranks, spans
from paceline.launch.tracebacks import Frame, Section, cut, read_sections, without_colours
from paceline.notebook.events import Died, Failed
from paceline.notebook.rank_kernels.cell_run import CellOutcome

MAX_LINES = 15  # of one error, on however many ranks
MAX_MORE = 8  # of each further one
MAX_WHOLE = 4  # as many errors are drawn; more are named
MAX_NAMED = 6
MAX_MESSAGE = 4
MAX_VALUES = 5
MAX_CAUSES = 2
MAX_LAST_LINES = 6
MAX_WIDTH = 300
_CXX_PLACE = re.compile(r"^\[[^\]]*\.(?:cc|cpp|cu|h|hpp):\d+\] ")
_ARROW = re.compile(r"\s*-+> ?\d+")
_EMPTY = re.compile(r"\s*(?:\d+ #)?\s*")  # also the comments that replace lines of the notebook's cell
# The path of the site-packages folder adds nothing.
_FOLDERS = re.compile(r"(File (?:\x1b\[[0-9;]*m)*)[^\x1b\n]*/(?:(?:site|dist)-packages|lib/python3\.\d+)/")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


class RanksFailed(PacelineError):
    """A cell failed on some ranks. `outcome` has the whole tracebacks, in `failures`, and `deaths`."""

    def __init__(self, outcome: CellOutcome, size: int) -> None:
        super().__init__(outcome, size)
        self.outcome = outcome
        self.size = size

    def __str__(self) -> str:
        deaths = [f"{name_ranks(ranks)} {_how(died, ranks)}" for ranks, died in _same_deaths(self.outcome.deaths)]
        causes, consequences = self._errors()
        errors = [error.title(self.size) + error.brief() for error in causes or ([] if deaths else consequences)]
        return "; ".join([*deaths, *errors]) or "the cell failed"

    def _render_traceback_(self) -> list[str]:
        """Called by IPython instead of its own traceback."""
        lines: list[str] = []
        for ranks, died in _same_deaths(self.outcome.deaths):
            lines += _render_death(ranks, died, self.size)
        causes, consequences = self._errors()
        if not causes and not lines:
            causes, consequences = consequences, []
        for number, error in enumerate(causes):
            if number < MAX_WHOLE:
                lines += error.draw(self.size, MAX_MORE if lines else MAX_LINES)
        lines += _shorten([error.title(self.size) + error.brief() for error in causes[MAX_WHOLE:]], MAX_NAMED, "errors")
        followed = [f"{name_ranks(error.ranks)}{error.brief(named=True)} (a consequence)" for error in consequences]
        lines += _shorten(followed, MAX_NAMED, "errors")
        return lines

    def _errors(self) -> tuple[list["_Error"], list["_Error"]]:
        """The errors, and those caused by a death, by the stop button or by another rank's error."""
        groups: dict[object, list[Failed]] = {}
        for failed in sorted(self.outcome.failures, key=lambda failed: failed.rank):
            groups.setdefault(_signature(failed), []).append(failed)
        errors = [_Error(tuple(same)) for same in groups.values()]
        own = [error for error in errors if not error.follows]
        if not own and not self.outcome.deaths and not self.outcome.interrupted:
            return errors, []
        return own, [error for error in errors if error.follows]


@dataclass(frozen=True)
class _Error:
    """One error, raised at the same place on some ranks."""

    failures: tuple[Failed, ...]

    @property
    def ranks(self) -> list[int]:
        return [failed.rank for failed in self.failures]

    @property
    def follows(self) -> bool:
        first = self.failures[0]
        return names_a_peer_failure(f"{first.name}: {first.value}")

    def title(self, size: int, *, colour: bool = False) -> str:
        name = self.failures[0].name
        return f"{_red(name) if colour else name} on {name_ranks(self.ranks)} ({len(self.ranks)} of {size})"

    def brief(self, *, named: bool = False) -> str:
        """Its message, in one line."""
        first = self.failures[0]
        message = _CXX_PLACE.sub("", first.value.strip().partition("\n")[0])
        parts = [first.name, message] if named else [message]
        return "".join(f": {cut(part, 160)}" for part in parts if part)

    def draw(self, size: int, room: int) -> list[str]:
        first = self.failures[0]
        *before, last = _sections(first)
        title = self.title(size, colour="\x1b[" in "".join(first.traceback))
        less = 0 if room >= MAX_LINES else 2  # if there is little room, the user's line comes first
        end = self._values(MAX_VALUES - less) or _ends(_message(last, first), MAX_MESSAGE - less)
        causes = [_cause(section) for section in reversed(before)]
        causes = _shorten(causes, max(1, MAX_CAUSES - less), "exceptions before")
        frames = _draw_frames(last.frames, room - 1 - len(end) - len(causes))
        if not first.traceback:
            end = [*end, "(Python wrote its traceback itself, above)"]
        return [title, *frames, *end, *causes]

    def _values(self, most: int) -> list[str]:
        """The message of the error on each rank, where that differs."""
        messages: dict[tuple[str, ...], list[int]] = {}
        for failed in self.failures:
            messages.setdefault(tuple(_ADDRESS.sub("0x…", failed.value).split("\n")), []).append(failed.rank)
        if len(messages) == 1:
            return []
        first = self.failures[0]
        place = next(
            number
            for number in range(max(map(len, messages)))
            if len({lines[number : number + 1] for lines in messages}) > 1
        )
        head = f": {first.value.split(chr(10))[0]}" if place else ": the messages differ"
        found = [
            f"  {name_ranks(ranks)}: {cut(lines[place] if place < len(lines) else '', 160)}"
            for lines, ranks in messages.items()
        ]
        if len(found) > most:
            others = sum(map(len, list(messages.values())[most - 1 :]))
            found = [*found[: most - 1], f"  … and other messages on {others} more ranks"]
        return [f"{first.name}{cut(head, MAX_WIDTH)}", *found]


def _sections(failed: Failed) -> list[Section]:
    return read_sections("\n".join(failed.traceback).split("\n"))


def _signature(failed: Failed) -> object:
    """Equal for errors that are shown as one: the same class, raised at the same places."""
    sections = _sections(failed)
    # A recursion may end at different depths.
    places = tuple(dict.fromkeys(frame.where for section in sections for frame in section.frames))
    return failed.name, places, len(sections)


def _message(section: Section, failed: Failed) -> list[str]:
    lines = [line for line in section.message if without_colours(line).strip() and "use %tb to see" not in line]
    if lines == [] or without_colours(lines[0]).strip() in (f"{failed.name}:", failed.name):
        whole = [line for line in f"{failed.name}: {failed.value}".split("\n") if line.strip()]
        lines = whole if failed.value and not lines else lines[1:]
    return [line if len(line) <= MAX_WIDTH else cut(without_colours(line), MAX_WIDTH) for line in lines]


def _shorten(lines: list[str], count: int, what: str) -> list[str]:
    if len(lines) <= count:
        return lines
    return [*lines[: count - 1], f"… {len(lines) - count + 1} more {what}"]


def _ends(lines: list[str], count: int) -> list[str]:
    """The first lines of a message and, where there is room, its last: a traceback in it ends with what happened."""
    if len(lines) <= count or count < 4:
        return _shorten(lines, count, "lines")
    return [*lines[: count - 2], f"… {len(lines) - count + 1} more lines", lines[-1]]


def _cause(section: Section) -> str:
    """One line about an exception that led to the shown one."""
    message = without_colours(section.message[0]) if section.message else "an exception"
    own = [frame for frame in section.frames if not frame.package] or list(section.frames)
    place = f" ({without_colours(own[-1].header).removesuffix(':')})" if own else ""
    return f"{section.leads} {cut(message, 160)}{place}"


def _same_deaths(deaths: Sequence[Died]) -> list[tuple[list[int], Died]]:
    groups: dict[object, list[Died]] = {}
    for died in sorted(deaths, key=lambda died: died.rank):
        groups.setdefault((died.how, died.last_lines), []).append(died)
    return [([died.rank for died in same], same[0]) for same in groups.values()]


def _render_death(ranks: list[int], died: Died, size: int) -> list[str]:
    last_lines = [cut(line, MAX_WIDTH) for line in died.last_lines if line.strip()][-MAX_LAST_LINES:]
    found = [f"{name_ranks(ranks)} {_how(died, ranks)} ({len(ranks)} of {size})"]
    if last_lines:
        found += ["Last lines of standard error:", *(f"  {line}" for line in last_lines)]
    them = "it" if len(ranks) == 1 else "them"
    return [*found, f"%dist_restart {spans(ranks)} brings {them} back; the other ranks keep their variables."]


def _how(died: Died, ranks: list[int]) -> str:
    return died.how if len(ranks) == 1 else re.sub(r"^was\b", "were", died.how)


def _red(text: str) -> str:
    return f"\x1b[31m{text}\x1b[39m"


def _draw_frames(frames: Sequence[Frame], room: int) -> list[str]:
    """Draw frames in at most `room` lines: the user's own and the last one with their source; others are counted."""
    shown = {
        number: [line for line in frame.lines if _ARROW.match(without_colours(line))] or list(frame.lines)
        for number, (frame, after) in enumerate(zip(frames, [*frames[1:], None], strict=False))
        # In a recursion, which repeats a place, the last frame.
        if (after is None and frame.lines) or not (frame.package or (after and after.where == frame.where))
    }
    while len(_rows(frames, shown)) > room and len(shown) > 1:
        # Frames in between are dropped first, then the library's: the user's own line stays.
        numbers = list(shown)
        del shown[numbers[1 if len(shown) > 2 or frames[numbers[1]].package else 0]]
    for number in reversed(list(shown)):  # the lines around the arrow of the user's own frames, where there is room
        around = [line for line in frames[number].lines if not _EMPTY.fullmatch(without_colours(line))]
        if not frames[number].package and len(_rows(frames, {**shown, number: around})) <= room:
            shown[number] = around
    return _rows(frames, shown)[: max(room, 0)]


def _rows(frames: Sequence[Frame], shown: Mapping[int, list[str]]) -> list[str]:
    found: list[str] = []
    for number, run in groupby(range(len(frames)), key=lambda number: number if number in shown else None):
        if number is None:
            found.append(_count([frames[left_out] for left_out in run]))
        else:
            found += [_FOLDERS.sub(r"\1", frames[number].header.strip()), *shown[number]]
    return found


def _count(frames: Sequence[Frame]) -> str:
    packages = list(dict.fromkeys(frame.package or "cells" for frame in frames))
    if packages == ["frames like these"]:
        return without_colours(frames[0].header).strip().strip("[]").replace("...", "…")
    names = ", ".join(packages[:3]) + (", …" if len(packages) > 3 else "")
    return f"… {len(frames)} frame{'s' if len(frames) > 1 else ''} in {names}"
