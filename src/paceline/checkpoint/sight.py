"""Which ranks share a directory. Hosts that do not share one each get their own copy of every generation."""

import os
import secrets
from pathlib import Path

from paceline.checkpoint.agree import Group, gather, here
from paceline.stored.directory import make_directory


def is_writer(directory: Path, group: Group) -> bool | None:
    """Whether this rank is the lowest of those that see the same `directory`. All ranks call it.

    Every rank puts down a file and looks for those of lower ranks. None means that some rank could not: then only
    rank 0 should write, whose write will say what is wrong, and the question is worth asking again.
    """
    rank, size = here(group)
    if size == 1:
        return True
    [token, *_] = [token for (token,) in gather([secrets.randbits(60)], group)]
    probe = f".seen-{token:x}-"
    try:
        make_directory(directory)
        (directory / f"{probe}{rank}").touch(exist_ok=False)
        put_down = True
    except OSError:
        put_down = False
    try:
        everywhere = all(done for (done,) in gather([put_down], group))
        # Asked by name: a listing may be out of date where the directory is on another machine.
        lowest = not any(os.path.lexists(directory / f"{probe}{other}") for other in range(rank))
        gather([0], group)  # all have looked
    finally:
        if put_down:
            (directory / f"{probe}{rank}").unlink()
    return lowest if everywhere else None
