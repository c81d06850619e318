"""Errors of several ranks as one exception: each distinct error once, with its ranks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.launch.failure import End, follows
from paceline.launch.lines import name_ranks, spans
from paceline.launch.tracebacks import HEADER, cut
from paceline.notebook.events import Died, Failed
from paceline.notebook.fleet.running import Outcome
from paceline.notebook.page.tracebacks import Section, draw, read, without_colours

MAX_LINES = 15  # of one error, on however many ranks
MAX_MORE = 8  # of each further one
MAX_WHOLE = 4  # so many errors are drawn, more are named
MAX_NAMED = 6
MAX_MESSAGE = 4
MAX_VALUES = 5
MAX_CAUSES = 2
MAX_WORDS = 6
MAX_WIDTH = 300
_CXX_PLACE = re.compile(r"^\[[^\]]*\.(?:cc|cpp|cu|h|hpp):\d+\] ")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


class RanksFailed(PacelineError):
    """A cell failed on some ranks. `outcome` has the whole tracebacks, in `failures`, and `deaths`."""

    def __init__(self, outcome: Outcome, size: int) -> None:
        super().__init__(outcome, size)
        self.outcome = outcome
        self.size = size

    def __str__(self) -> str:
        deaths = [f"{name_ranks(ranks)} {_how(died, ranks)}" for ranks, died in _same_deaths(self.outcome.deaths)]
        causes, consequences = self._errors()
        errors = [error.title(self.size) + error.brief() for error in causes or ([] if deaths else consequences)]
        return "; ".join([*deaths, *errors]) or "the cell failed"

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of a traceback of its own."""
        lines: list[str] = []
        for ranks, died in _same_deaths(self.outcome.deaths):
            lines += _tell_death(ranks, died, self.size)
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
        """The errors, and those that came of a death, of the stop button or of another rank's error."""
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
        return follows(End(first.rank, 0.0, code=1, raised=True, tail=(HEADER, f"{first.name}: {first.value}")))

    def title(self, size: int, *, colour: bool = False) -> str:
        name = self.failures[0].name
        return f"{_red(name) if colour else name} on {name_ranks(self.ranks)} ({len(self.ranks)} of {size})"

    def brief(self, *, named: bool = False) -> str:
        """What it says, in one line."""
        first = self.failures[0]
        said = _CXX_PLACE.sub("", first.value.strip().partition("\n")[0])
        words = [first.name, said] if named else [said]
        return "".join(f": {cut(word, 160)}" for word in words if word)

    def draw(self, size: int, room: int) -> list[str]:
        first = self.failures[0]
        *before, last = read(first.traceback, first.name)
        title = self.title(size, colour="\x1b[" in "".join(first.traceback))
        less = 0 if room >= MAX_LINES else 2  # where there is little room, the user's line comes first
        end = self._values(MAX_VALUES - less) or _ends(_message(last, first), MAX_MESSAGE - less)
        causes = [_cause(section) for section in reversed(before)]
        causes = _shorten(causes, max(1, MAX_CAUSES - less), "exceptions before")
        frames = draw(last.frames, room - 1 - len(end) - len(causes))
        if not first.traceback:
            end = [*end, "(Python wrote its traceback itself, above)"]
        return [title, *frames, *end, *causes]

    def _values(self, most: int) -> list[str]:
        """What the error says on each rank, where that differs."""
        said: dict[tuple[str, ...], list[int]] = {}
        for failed in self.failures:
            said.setdefault(tuple(_ADDRESS.sub("0x…", failed.value).split("\n")), []).append(failed.rank)
        if len(said) == 1:
            return []
        first = self.failures[0]
        place = next(
            number for number in range(max(map(len, said))) if len({lines[number : number + 1] for lines in said}) > 1
        )
        head = f": {first.value.split(chr(10))[0]}" if place else ": what it says differs"
        found = [
            f"  {name_ranks(ranks)}: {cut(lines[place] if place < len(lines) else '', 160)}"
            for lines, ranks in said.items()
        ]
        if len(found) > most:
            others = sum(map(len, list(said.values())[most - 1 :]))
            found = [*found[: most - 1], f"  … and something else on {others} more ranks"]
        return [f"{first.name}{cut(head, MAX_WIDTH)}", *found]


def _signature(failed: Failed) -> object:
    """Equal for errors that are shown once: the same class at the same places."""
    sections = read(failed.traceback, failed.name)
    # A recursion may end at different depths.
    places = tuple(dict.fromkeys(frame.where for section in sections for frame in section.frames))
    return failed.name, places, len(sections)


def _message(section: Section, failed: Failed) -> list[str]:
    lines = [line for line in section.message if without_colours(line).strip() and "use %tb to see" not in line]
    if lines == [] or without_colours(lines[0]).strip() in (f"{failed.name}:", failed.name):
        said = [line for line in f"{failed.name}: {failed.value}".split("\n") if line.strip()]
        lines = said if failed.value and not lines else lines[1:]
    return [line if len(line) <= MAX_WIDTH else cut(without_colours(line), MAX_WIDTH) for line in lines]


def _shorten(lines: list[str], count: int, what: str) -> list[str]:
    if len(lines) <= count:
        return lines
    return [*lines[: count - 1], f"… {len(lines) - count + 1} more {what}"]


def _ends(lines: list[str], count: int) -> list[str]:
    """The first lines of a message and, where there is room, its last: a traceback in it says there what happened."""
    if len(lines) <= count or count < 4:
        return _shorten(lines, count, "lines")
    return [*lines[: count - 2], f"… {len(lines) - count + 1} more lines", lines[-1]]


def _cause(section: Section) -> str:
    """One line about an exception that led to the one that is shown."""
    said = without_colours(section.message[0]) if section.message else "an exception"
    own = [frame for frame in section.frames if not frame.package] or list(section.frames)
    place = f" ({without_colours(own[-1].header).removesuffix(':')})" if own else ""
    return f"{section.leads} {cut(said, 160)}{place}"


def _same_deaths(deaths: Sequence[Died]) -> list[tuple[list[int], Died]]:
    groups: dict[object, list[Died]] = {}
    for died in sorted(deaths, key=lambda died: died.rank):
        groups.setdefault((died.how, died.words), []).append(died)
    return [([died.rank for died in same], same[0]) for same in groups.values()]


def _tell_death(ranks: list[int], died: Died, size: int) -> list[str]:
    words = [cut(line, MAX_WIDTH) for line in died.words if line.strip()][-MAX_WORDS:]
    found = [f"{name_ranks(ranks)} {_how(died, ranks)} ({len(ranks)} of {size})"]
    if words:
        found += ["Last lines of standard error:", *(f"  {line}" for line in words)]
    them = "it" if len(ranks) == 1 else "them"
    return [*found, f"%dist_restart {spans(ranks)} brings {them} back; the other ranks keep their variables."]


def _how(died: Died, ranks: list[int]) -> str:
    return died.how if len(ranks) == 1 else re.sub(r"^was\b", "were", died.how)


def _red(text: str) -> str:
    return f"\x1b[31m{text}\x1b[39m"
