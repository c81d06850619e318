"""How a rank tells its launcher something: JSON lines into a pipe that the launcher reads. Without a launcher, nothing.

    tell("step", step=12, loss=3.1)

The variable PACELINE_TELL_FD names the descriptor together with its inode, so that a program which inherits the
variable and not the pipe never writes into whatever else has the same number there.
"""

import json
import os
import select
import time
from typing import Any, NamedTuple

TELL_NAME = "PACELINE_TELL_FD"
RECORD_NAME = "PACELINE_DETERMINISM"  # a file for what a replica computes, and how many steps of it
RECORD_STEPS_NAME = "PACELINE_DETERMINISM_STEPS"
# A launcher that does not read for this long loses the line; training goes on.
PATIENCE_S = 0.05
MAX_LINE = 1 << 20


class Told(NamedTuple):
    """One thing that a rank has told."""

    kind: str
    fields: dict[str, Any]


def tell(kind: str, **fields: object) -> None:
    """Tell the launcher something. It never raises, and waits at most a moment for a launcher that does not read.

    What JSON does not know is sent as its text. Lines of up to 4 KiB are whole even when several threads tell at once.
    """
    descriptor = inherited_descriptor(os.environ.get(TELL_NAME, ""))
    if descriptor is not None:
        line = json.dumps({"kind": kind, **fields}, default=str)
        _write(descriptor, line.encode() + b"\n")


def describe_descriptor(descriptor: int) -> str:
    """What to put into the environment of a child that inherits `descriptor`."""
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"


def inherited_descriptor(named: str) -> int | None:
    """The descriptor that `describe_descriptor` named, if this process really has it."""
    number, _, inode = named.partition(":")
    if not (number.isdigit() and inode.isdigit()):
        return None
    try:
        return int(number) if os.fstat(int(number)).st_ino == int(inode) else None
    except OSError:  # not open here: a program further down inherited the variable alone
        return None


def _write(descriptor: int, data: bytes) -> None:
    deadline = time.monotonic() + PATIENCE_S
    room = select.poll()
    room.register(descriptor, select.POLLOUT)
    while data:
        try:
            # The pipe blocks or not as the launcher made it; asking first keeps a full one from holding the rank.
            if not room.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                return
            data = data[os.write(descriptor, data[:4096]) :]
        except BlockingIOError:  # another thread filled it between the question and the write
            continue
        except OSError:  # the launcher is gone; whoever is left has nobody to tell
            return


class TellReader:
    """The launcher's end: bytes of one rank in, whole lines out. A line that is not one of ours is dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Told]:
        """Add bytes; return what they complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            self._rest = b""
        return [told for line in lines if (told := _parse(line)) is not None]


def _parse(line: bytes) -> Told | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        return None
    return Told(found.pop("kind"), found)
