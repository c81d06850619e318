"""Tracebacks read back from text: Python's, as a failing rank writes them to standard error, and IPython's."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

HEADER = "Traceback (most recent call last):"
GROUP_HEADER = "  + Exception Group Traceback (most recent call last):"
FATAL = "Fatal Python error:"  # faulthandler's, before the stacks of all threads
IGNORED = "Exception ignored "  # before the traceback of an error in a destructor, which does not end the process
MAX_DETAIL = 10
LEAST_FRAMES = 3
LINE, MAX_LINES = 240, 4  # of a message
MAX_PARTS = 6
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)")
_NOT_ITS_MESSAGE = re.compile(rf"\[|\w+:\s*(WARN|INFO)|/|{IGNORED}")
_GROUP = re.compile(r"\(\d+ sub-exceptions?\)$")
_BARS = re.compile(r"^ +(\||\+)[-+]*")  # the prefix of each line of a group's traceback
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_RULE = re.compile(r"-{5,}\s*")
_CELL = re.compile(r"\s*(Cell In ?\[\d+\](?:, line \d+)?)")
_FILE = re.compile(r"""\s*File (?:"(?P<quoted>[^"]+)", line (?P<line>\d+)|(?P<path>.+?):(?P<number>\d+)(?=$|,|\s))""")
_SKIPPED = re.compile(r"\s*\[\.\.\. skipping")
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/([^/]+)")
_STANDARD = re.compile(r".*/lib/python3(?:\.\d+)?/([^/]+)|<frozen ([^>]+)>")
_OURS = re.compile(r".*/src/(paceline)/\w+")
_LINKS = {
    "The above exception was the direct cause": "caused by",
    "During handling of the above exception": "raised while handling",
}


@dataclass(frozen=True)
class Frame:
    """One frame: a header that says where it is, and lines of its source. `package` is empty for the user's code."""

    header: str
    lines: tuple[str, ...]
    where: str
    package: str


@dataclass(frozen=True)
class Section:
    """One exception: its frames, the outermost first, and its message. `leads` says how it led to the next one.

    `parts` are the exceptions of a group: a frame, then a message.
    """

    frames: tuple[Frame, ...]
    message: tuple[str, ...]
    leads: str = ""
    parts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        found = _EXCEPTION.match(self.message[0]) if self.message else None
        return found[1] if found else ""

    @property
    def reasons(self) -> tuple[str, ...]:
        """The message; for a group, the messages of its exceptions."""
        inside = tuple(line for line in self.parts if not (line.startswith(" ") or _GROUP.search(line)))
        return inside or (" ".join(self.message),)

    def details(self, taken: int = 0) -> tuple[str, ...]:
        """The last frames, where the error is. The message precedes them and takes `taken` of the lines."""
        lines = [line for frame in self.frames for line in (frame.header, *frame.lines)]
        frames = [cut(line, 160) for line in lines if _says_something(line)]
        more = [cut(line, 390) for line in (*self.message[1:], *_first(self.parts))]
        room = max(LEAST_FRAMES, MAX_DETAIL - len(more) - taken)
        if len(frames) > room:
            frames = [frames[0], f"  … {len(frames) - room + 1} lines left out …", *frames[len(frames) - room + 2 :]]
        return (*frames, *more)


def read_sections(lines: Sequence[str]) -> list[Section]:
    """The exceptions of a traceback in Python's or IPython's format, colours and all; the one that was raised last."""
    sections: list[Section] = []
    frames: list[tuple[str, list[str]]] = []
    message: list[str] = []
    for line in lines:
        plain = without_colours(line)
        if link := next((word for text, word in _LINKS.items() if text in plain), ""):
            sections.append(_section(frames, message, link))
            frames, message = [], []
        elif message:
            message.append(line)
        elif not plain.strip() or _RULE.fullmatch(plain) or HEADER.rstrip(":") in plain:
            continue
        elif _CELL.match(plain) or _FILE.match(plain) or _SKIPPED.match(plain):
            frames.append((line, []))
        elif frames and plain[0] in " -":  # of source, or the arrow before it
            frames[-1][1].append(line)
        else:
            message.append(line)
    return [*sections, _section(frames, message)]


def _section(frames: Sequence[tuple[str, list[str]]], message: Sequence[str], leads: str = "") -> Section:
    return Section(tuple(_frame(header, source) for header, source in frames), tuple(message), leads)


def _frame(header: str, source: Sequence[str]) -> Frame:
    plain = without_colours(header)
    if found := _CELL.match(plain):
        return Frame(header, tuple(source), found[1], "")
    if found := _FILE.match(plain):
        path = found["quoted"] or found["path"]
        return Frame(header, tuple(source), f"{path}:{found['line'] or found['number']}", package_of(path))
    return Frame(header, (), "", "frames like these")


def package_of(path: str) -> str:
    """The package that a file belongs to; empty for a file of the user's."""
    if found := _INSTALLED.match(path) or _STANDARD.match(path):
        name: str = next(filter(None, found.groups()))
        return name.removesuffix(".py")
    if path.startswith("<"):
        return path
    found = _OURS.match(path)
    return found[1] if found else ""


def without_colours(text: str) -> str:
    return _COLOUR.sub("", text)


def begins(line: str) -> bool:
    """Whether this line begins a traceback."""
    return line.startswith((HEADER, GROUP_HEADER, FATAL))


def is_whole(lines: Sequence[str]) -> bool:
    """Whether the traceback in `lines` is complete. After a report of faulthandler the process ends."""
    if not lines or lines[0].startswith(FATAL):
        return False
    start = max(number for number, line in enumerate(lines) if begins(line))
    if lines[start].startswith(GROUP_HEADER):
        return any(re.fullmatch(r" +\+-+", line) for line in lines[start + 1 :])
    return any(line and not line.startswith(" ") for line in lines[start + 1 :])


def last_traceback(tail: Sequence[str]) -> Section | None:
    """The last traceback in a rank's last lines that may have ended it."""
    starts = [
        number
        for number, line in enumerate(tail)
        if line.startswith((HEADER, GROUP_HEADER)) and not (number and tail[number - 1].startswith(IGNORED))
    ]
    if not starts:
        return None
    body = tail[starts[-1] + 1 :]
    if not tail[starts[-1]].startswith(GROUP_HEADER):
        return _plain(body)
    inside = next((number for number, line in enumerate(body) if line.startswith("  +")), len(body))
    # For repeated frames, Python 3.11 omits the bar.
    outer = _plain([line.removeprefix("  | ") for line in body[:inside]])
    return None if outer is None else replace(outer, parts=_parts(body[inside:]))


def _plain(body: Sequence[str]) -> Section | None:
    section = read_sections(body)[0]
    if not section.message:
        return None
    first, *more = section.message
    more = list(takewhile(lambda line: line and not _NOT_ITS_MESSAGE.match(line), more[:2]))
    return replace(section, message=(first, *more))


def _parts(lines: Sequence[str]) -> tuple[str, ...]:
    """The last frame and the first line of the message of each exception in a group."""
    found: list[str] = []
    frame = ""
    for line in lines:
        if not _BARS.match(line):  # after the end of the group
            continue
        text = _BARS.sub("", line).removeprefix(" ")
        if text.startswith("  File "):
            frame = text
        elif _EXCEPTION.match(text):
            found += [frame, text] if frame else [text]
            frame = ""
    return tuple(found)


def _first(parts: Sequence[str]) -> list[str]:
    if len(parts) <= MAX_PARTS:
        return list(parts)
    return [*parts[: MAX_PARTS - 1], f"… {len(parts) - MAX_PARTS + 1} more lines in the log"]


def _says_something(line: str) -> bool:
    return bool(set(line.strip()) - set("^~"))


def thread_stack(tail: Sequence[str]) -> tuple[str, ...]:
    """What faulthandler wrote when a signal ended a rank: the thread that Python names as the current one."""
    starts = _threads(tail)
    current = [number for number in starts if tail[number].startswith("Current thread")] or starts[-1:]
    return _frames_after(tail, current[-1]) if current else ()


def main_stack(tail: Sequence[str]) -> tuple[str, ...]:
    """The same for the main thread, which comes last: where an aborted rank had stopped. The current thread is then
    only the one that received the signal."""
    starts = _threads(tail)
    return _frames_after(tail, starts[-1]) if starts else ()


def _threads(tail: Sequence[str]) -> list[int]:
    return [number for number, line in enumerate(tail) if line.startswith(("Current thread", "Thread 0x"))]


def _frames_after(tail: Sequence[str], start: int) -> tuple[str, ...]:
    frames = []
    for line in tail[start + 1 :]:
        if not line.startswith("  File"):
            break
        frames.append(cut(line, 160))
    return tuple(frames[:6])


def own_line(stack: Sequence[str]) -> str:
    """The user's innermost line of a stack: `train.py:12 in loss`."""
    found = [(match, line) for line in stack if (match := _FILE.match(line)) and match["quoted"]]
    match, line = next((one for one in found if not package_of(one[0]["quoted"])), found[0] if found else (None, ""))
    return f"{match['quoted']}:{match['line']}{line[match.end() :]}" if match else ""


def wrapped(text: str) -> list[str]:
    """A message in a few lines. The end says what to do, so the middle of a long message is left out."""
    lines = textwrap.wrap(text, LINE, break_on_hyphens=False) or [text]
    return lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 2], "…", lines[-1]]


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
