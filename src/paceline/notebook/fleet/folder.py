"""The private folder of a session: sockets, and where the ranks of a generation meet."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import UsageError

PREFIX = "paceline-notebook-"
LONGEST = 60  # the path of a socket has at most 107 bytes


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that only this user can look into, as long as the block lasts.

    Its owner holds a lock. Who was killed cannot take its folder away; the next one does, since nobody holds that lock.
    """
    try:
        base = Path(tempfile.gettempdir())
    except FileNotFoundError as error:  # it lists all that it has tried
        raise no_room("any folder for temporary files", error) from error
    base = base if len(str(base)) < LONGEST else Path("/tmp")
    _sweep(base)
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        lock = os.open(folder / "lock.new", os.O_WRONLY | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock.new").rename(folder / "lock")  # nobody sees it before it is held
    except OSError as error:
        raise no_room(base, error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def no_room(folder: Path | str, error: OSError) -> UsageError:
    """The error of someone whose disk is full, or not theirs to write on."""
    return UsageError(
        f"the sockets of the ranks cannot be made in {folder}: {error.strerror or error}; make room there, or set "
        f"TMPDIR to a folder that can be written"
    )


def _sweep(base: Path) -> None:
    for left in base.glob(f"{PREFIX}*"):
        try:
            # Not blocking, and no link: anyone may have made a file of that name.
            lock = os.open(left / "lock", os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:  # not made yet, gone meanwhile, or someone else's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
        except BlockingIOError:  # its owner lives
            continue
        finally:
            os.close(lock)
