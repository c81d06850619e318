"""What Python writes when a rank falls: its last traceback, read back from the lines of standard error."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

HEADER = "Traceback (most recent call last):"
GROUP_HEADER = "  + Exception Group Traceback (most recent call last):"
FATAL = "Fatal Python error:"  # faulthandler's, before the stacks of all threads
IGNORED = "Exception ignored "  # before the traceback of what a destructor has raised: it ends nothing
MAX_DETAIL = 10
LEAST_FRAMES = 3
LINE, MAX_LINES = 240, 4  # of a message
MAX_PARTS = 6
_EXCEPTION = re.compile(r"^([A-Za-z_][\w.]*)(?::|$)")
_NOT_ITS_MESSAGE = re.compile(rf"\[|\w+:\s*(WARN|INFO)|/|{IGNORED}")
_GROUP = re.compile(r"\(\d+ sub-exceptions?\)$")
_BARS = re.compile(r"^ +(\||\+)[-+]*")  # what stands before each line of a group's traceback


@dataclass(frozen=True)
class Traceback:
    """Frames and message of an exception. `parts` are, of a group, the exceptions in it: a frame, then a message."""

    frames: tuple[str, ...]
    message: tuple[str, ...]
    parts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        found = _EXCEPTION.match(self.message[0])
        return found[1] if found else ""

    @property
    def reasons(self) -> tuple[str, ...]:
        """What was wrong: of a group, what each of its exceptions says."""
        inside = tuple(line for line in self.parts if not (line.startswith(" ") or _GROUP.search(line)))
        return inside or (" ".join(self.message),)

    def details(self, taken: int = 0) -> tuple[str, ...]:
        """The last frames, where the error is; the message itself stands before them, in `taken` lines of the room."""
        frames = [cut(line, 160) for line in self.frames if _says_something(line)]
        more = [cut(line, 390) for line in (*self.message[1:], *_first(self.parts))]
        room = max(LEAST_FRAMES, MAX_DETAIL - len(more) - taken)
        if len(frames) > room:
            frames = [frames[0], f"  … {len(frames) - room + 1} lines left out …", *frames[len(frames) - room + 2 :]]
        return (*frames, *more)


def begins(line: str) -> bool:
    """Whether Python begins to tell here why it falls."""
    return line.startswith((HEADER, GROUP_HEADER, FATAL))


def is_whole(lines: Sequence[str]) -> bool:
    """Whether the traceback in `lines` has come to its last line. What faulthandler writes is followed by an end."""
    if not lines or lines[0].startswith(FATAL):
        return False
    start = max(number for number, line in enumerate(lines) if begins(line))
    if lines[start].startswith(GROUP_HEADER):
        return any(re.fullmatch(r" +\+-+", line) for line in lines[start + 1 :])
    return any(line and not line.startswith(" ") for line in lines[start + 1 :])


def last_traceback(tail: Sequence[str]) -> Traceback | None:
    """The last one in a rank's last words that may have ended it."""
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
    # Where a frame repeats, Python 3.11 forgets the bar.
    outer = _plain([line.removeprefix("  | ") for line in body[:inside]])
    return None if outer is None else Traceback(outer.frames, outer.message, _parts(body[inside:]))


def _plain(body: Sequence[str]) -> Traceback | None:
    frames: list[str] = []
    message: list[str] = []
    for line in body:
        if not message and (line.startswith(" ") or not line):
            frames.append(line)
        elif not message or (len(message) < 3 and line and not _NOT_ITS_MESSAGE.match(line)):
            message.append(line)
        else:
            break
    return Traceback(tuple(frames), tuple(message)) if message else None


def _parts(lines: Sequence[str]) -> tuple[str, ...]:
    """Of each exception in a group its last frame and the first line of its message."""
    found: list[str] = []
    frame = ""
    for line in lines:
        if not _BARS.match(line):  # not the group's any more
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
    starts = [number for number, line in enumerate(tail) if line.startswith(("Current thread", "Thread 0x"))]
    current = [number for number in starts if tail[number].startswith("Current thread")] or starts[-1:]
    if not current:
        return ()
    frames = []
    for line in tail[current[-1] + 1 :]:
        if not line.startswith("  File"):
            break
        frames.append(cut(line, 160))
    return tuple(frames[:6])


def wrapped(text: str) -> list[str]:
    """A message in a few lines. What to do stands at its end, so if it is too long the middle is left out."""
    lines = textwrap.wrap(text, LINE, break_on_hyphens=False) or [text]
    return lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 2], "…", lines[-1]]


def cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
