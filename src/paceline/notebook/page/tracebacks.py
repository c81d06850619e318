"""IPython's tracebacks, read back: which frames are the user's own, what was raised, what led to it."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RULE = re.compile(r"-{5,}\s*")
_CELL = re.compile(r"\s*(Cell In ?\[\d+\](?:, line \d+)?)")
_FILE = re.compile(r"""\s*File (?:"(?P<quoted>[^"]+)", line (?P<line>\d+)|(?P<path>.+?):(?P<number>\d+)(?=$|,|\s))""")
_SKIPPED = re.compile(r"\s*\[\.\.\. skipping")
_EMPTY = re.compile(r"\s*(?:\d+ #)?\s*")  # also the comments that stand for lines of the notebook's cell
_ARROW = re.compile(r"\s*-+> ?\d+")
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/([^/]+)")
_STANDARD = re.compile(r".*/lib/python3(?:\.\d+)?/([^/]+)|<frozen ([^>]+)>")
_OURS = re.compile(r".*/src/(paceline)/\w+")
# The path up to where packages are installed says nothing that the rest does not.
_FOLDERS = re.compile(r"(File (?:\x1b\[[0-9;]*m)*)[^\x1b\n]*/(?:(?:site|dist)-packages|lib/python3\.\d+)/")
_LINKS = {
    "The above exception was the direct cause": "caused by",
    "During handling of the above exception": "raised while handling",
}


def without_colours(text: str) -> str:
    return _COLOUR.sub("", text)


@dataclass(frozen=True)
class Frame:
    """One frame: where it is, and lines of its source. `package` is empty for the user's own code."""

    header: str
    lines: tuple[str, ...]
    where: str
    package: str = ""

    @property
    def arrow(self) -> int:
        """Which line is the one that runs."""
        arrows = (number for number, line in enumerate(self.lines) if _ARROW.match(without_colours(line)))
        return next(arrows, 0)


@dataclass(frozen=True)
class Section:
    """One exception: its frames from the outermost on, and what it says. `leads` tells what became of it."""

    frames: tuple[Frame, ...]
    message: tuple[str, ...]
    leads: str = ""


def read(traceback: Sequence[str], name: str) -> tuple[Section, ...]:
    """The exceptions of a traceback, the one that came out last. `name` is its class."""
    sections: list[Section] = []
    frames: list[Frame] = []
    message: list[str] = []
    for element in traceback:
        plain = without_colours(element)
        link = next((word for text, word in _LINKS.items() if text in plain), "")
        if link:
            sections.append(Section(tuple(frames), tuple(message), link))
            frames, message = [], []
        elif _RULE.fullmatch(plain) or "Traceback (most recent call last)" in plain:
            continue
        elif (frame := _frame(element)) is not None:
            code, said = _cut_off_message(frame, name)
            frames.append(code)
            message += said
        else:
            message += element.rstrip("\n").split("\n")
    return *sections, Section(tuple(frames), tuple(message))


def _frame(element: str) -> Frame | None:
    header, *lines = element.rstrip("\n").split("\n")
    plain = without_colours(header)
    if _SKIPPED.match(plain):
        return Frame(header, (), "", "frames like these")
    if found := _CELL.match(plain):
        return Frame(header.strip(), tuple(lines), found[1])
    found = _FILE.match(plain)
    if found is None:
        return None
    path = found["quoted"] or found["path"]
    return Frame(
        _FOLDERS.sub(r"\1", header.strip()),
        tuple(lines),
        f"{path}:{found['line'] or found['number']}",
        package_of(path),
    )


def _cut_off_message(frame: Frame, name: str) -> tuple[Frame, list[str]]:
    """Of a SyntaxError the message stands in the same text as the line."""
    for number, line in enumerate(frame.lines):
        if without_colours(line).startswith(f"{name}:"):
            return Frame(frame.header, frame.lines[:number], frame.where, frame.package), list(frame.lines[number:])
    return frame, []


def package_of(path: str) -> str:
    """The package that a file belongs to; empty for a file of the user's."""
    if found := _INSTALLED.match(path):
        return found[1].removesuffix(".py")
    if found := _STANDARD.match(path):
        return (found[1] or found[2]).removesuffix(".py")
    if path.startswith("<"):
        return path
    found = _OURS.match(path)
    return found[1] if found else ""


class _Piece:
    """A part of the picture that has its least and its whole size."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.shown = {frame.arrow} if _ARROW.match(_arrow_line(frame)) else set(range(len(frame.lines)))

    def lines(self) -> list[str]:
        return [self.frame.header, *(self.frame.lines[number] for number in sorted(self.shown))]

    def grow(self, room: int) -> int:
        """Show more lines, those near the arrow first. Returns what room is left."""
        near = sorted(range(len(self.frame.lines)), key=lambda number: abs(number - self.frame.arrow))
        for number in near:
            if (
                room > 0
                and number not in self.shown
                and not _EMPTY.fullmatch(without_colours(self.frame.lines[number]))
            ):
                self.shown.add(number)
                room -= 1
        return room


def _arrow_line(frame: Frame) -> str:
    return without_colours(frame.lines[frame.arrow]) if frame.lines else ""


def draw(frames: Sequence[Frame], room: int) -> list[str]:
    """Frames in at most so many lines: the user's own and the last one, each with its line; others are counted."""
    parts = _join(frames)
    pieces = [part for part in parts if isinstance(part, _Piece)]
    while _height(parts) > room and len(pieces) > 1:
        # What lies between goes first, then the library: the user's own line stays.
        gone = pieces.pop(1 if len(pieces) > 2 else 1 if pieces[1].frame.package else 0)
        at = parts.index(gone)
        parts[at] = [gone.frame]
        parts = _join_left_out(parts)
    left = room - _height(parts)
    for piece in reversed(pieces):
        if not piece.frame.package:
            left = piece.grow(left)
    found: list[str] = []
    for part in parts:
        found += part.lines() if isinstance(part, _Piece) else [_count(part)]
    return found[: max(room, 0)]


_Parts = list["_Piece | list[Frame]"]


def _join(frames: Sequence[Frame]) -> _Parts:
    parts: _Parts = []
    for frame, after in zip(frames, [*frames[1:], None], strict=False):
        is_repeated = after is not None and after.where == frame.where  # a recursion
        if (not frame.package and not is_repeated) or (after is None and frame.lines):
            parts.append(_Piece(frame))
        else:
            parts.append([frame])
    return _join_left_out(parts)


def _join_left_out(parts: Iterable["_Piece | list[Frame]"]) -> _Parts:
    joined: _Parts = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, list) and isinstance(last, list):
            joined[-1] = last + part
        else:
            joined.append(part)
    return joined


def _height(parts: _Parts) -> int:
    return sum(len(part.lines()) if isinstance(part, _Piece) else 1 for part in parts)


def _count(frames: Sequence[Frame]) -> str:
    packages = list(dict.fromkeys(frame.package or "cells" for frame in frames))
    if packages == ["frames like these"]:
        return without_colours(frames[0].header).strip().strip("[]").replace("...", "…")
    names = ", ".join(packages[:3]) + (", …" if len(packages) > 3 else "")
    return f"… {len(frames)} frame{'s' if len(frames) > 1 else ''} in {names}"
