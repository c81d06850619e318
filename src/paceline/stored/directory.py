"""Files and directories that survive a power failure, and a lock on a directory. Needs no torch."""

import errno
import fcntl
import hashlib
import logging
import os
import secrets
import socket
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from weakref import WeakValueDictionary

logger = logging.getLogger("paceline")

LOCK = ".lock"
PIECE = 1 << 20
CHUNK = 4 * PIECE
# File modes. Files that a run leaves for others, such as checkpoints, follow the user's umask; the rest is the user's
# alone. A lock file is accessible to all who may write to its directory, and to no one else.
SHARED, LOCK_MODE, PRIVATE = 0o666, 0o660, 0o600


@dataclass(frozen=True)
class FileRecord:
    """What a file must contain: its size, and the SHA-256 of each chunk of `chunk` bytes; the last may be shorter."""

    size: int
    chunk: int
    sha256: tuple[str, ...]


def open_to_write(path: Path, *, append: bool = False, new: bool = False, mode: int = PRIVATE) -> int:
    """Open a file for writing, created with this mode if it does not exist. Raises OSError.

    It is truncated, unless it is to `append` to or has to be `new`. A symbolic link in its place is not followed:
    anyone who can create one could otherwise have any file of the user's truncated or written to.
    """
    how = os.O_EXCL if new else 0 if append else os.O_TRUNC
    how |= os.O_APPEND if append else 0
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | how, mode)


def write_file(file: Path, parts: Iterable[bytes | memoryview], mode: int = SHARED) -> FileRecord:
    """Write a new file and wait until it is on disk. It is hashed in the same pass, while in the cache."""
    digests, size = [hashlib.sha256()], 0
    with os.fdopen(open_to_write(file, new=True, mode=mode), "wb") as out:
        for part in parts:
            view = memoryview(part)
            while view:
                if size == CHUNK * len(digests):
                    digests.append(hashlib.sha256())
                piece, view = view[: PIECE - size % PIECE], view[PIECE - size % PIECE :]
                digests[-1].update(piece)
                out.write(piece)
                size += len(piece)
        out.flush()
        os.fsync(out.fileno())
    return FileRecord(size, CHUNK, tuple(digest.hexdigest() for digest in digests))


def replace_file(file: Path, parts: Iterable[bytes | memoryview], mode: int = SHARED) -> None:
    """Replace the file of this name atomically. The directory must exist."""
    new = file.with_name(f".{file.name}.new-{secrets.token_hex(8)}")
    try:
        write_file(new, parts, mode)
        new.replace(file)
    except BaseException:
        with suppress(OSError):  # the first error is the one to raise
            new.unlink()
        raise
    fsync_directory(file.parent)


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, and return when all of their names are on disk."""
    missing = []
    for place in (path, *path.parents):
        if place.is_dir():
            break
        missing.append(place)
    for place in reversed(missing):
        # Another rank may make it at the same moment. It is synced here too: that rank may be slower.
        place.mkdir(exist_ok=True)
        fsync_directory(place)
        fsync_directory(place.parent)


def fsync_directory(path: Path) -> None:
    """Wait until the names in a directory are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fsync_open_directory(descriptor)
    finally:
        os.close(descriptor)


def fsync_open_directory(descriptor: int) -> None:
    """The same for a directory that is open already."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support this for directories: nothing more can be done.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


class _LockFile:
    """An open lock file. The kernel drops the locks of a process when it closes any descriptor of the file, so a
    process uses a single descriptor per file, this one."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, LOCK_MODE)
        weakref.finalize(self, os.close, self.descriptor)

    def signed(self) -> str:
        """The process that signed it last."""
        return os.pread(self.descriptor, 200, 0).decode(errors="replace").strip()

    def sign(self, more: str) -> None:
        text = f"process {os.getpid()} on {socket.gethostname()}{more}"
        if self.signed() != text:
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, f"{text}\n".encode(), 0)


class DirectoryLock:
    """Ownership of a directory by one process, with a lock on the file `.lock` in it.

    The lock belongs to the process: the kernel drops it when the process ends, and children do not inherit it. All
    objects of one process share the ownership. The file itself is not removed.
    """

    _open: ClassVar[WeakValueDictionary[tuple[int, int], _LockFile]] = WeakValueDictionary()  # by device and inode

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._file: _LockFile | None = None
        self._warned = False

    def acquire(self, more: str = "") -> str:
        """Take the lock, unless this process has it already. Returns "", or the name of the other process that has it
        and the `more` that it passed.

        Where files cannot be locked, a warning is logged once, and the directory counts as owned. Raises OSError if the
        directory does not exist.
        """
        self._path.parent.stat()
        try:
            self._file = self._current_file()
        except OSError as error:
            self._warn(error)
            return ""
        try:
            fcntl.lockf(self._file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                self._warn(error)
                return ""
            holder = self._file.signed() or "another process"
            self.release()
            return holder
        try:
            self._file.sign(more)
        except OSError as error:  # such as a full disk: the lock is valid without a name
            logger.debug("the owner could not be written to %s: %s", self._path, error)
        return ""

    def take_over(self, more: str = "") -> None:
        """Take the lock from a process that has it and must not, and is out of reach. That one finds out by `is_lost`,
        and its next `acquire` refuses it. Raises OSError."""
        fresh = self._path.with_name(f"{LOCK}.{secrets.token_hex(8)}")
        file = _LockFile(fresh)
        fcntl.lockf(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.sign(more)
        fresh.replace(self._path)
        self._open[_key(os.fstat(file.descriptor))] = self._file = file

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken the lock over."""
        if (file := self._file) is None:
            return False
        try:
            return _key(self._path.lstat()) != _key(os.fstat(file.descriptor))
        except FileNotFoundError:  # removed by someone; it is made again by the next `acquire`
            return False

    def release(self) -> None:
        """Let other processes have the directory, unless another object of this process still owns it."""
        self._file = None

    def _current_file(self) -> _LockFile:
        """The lock file that is in the directory now. The one that was locked may have been removed."""
        with suppress(FileNotFoundError):
            if (known := self._open.get(_key(self._path.lstat()))) is not None:
                return known
        opened = _LockFile(self._path)
        self._open[_key(os.fstat(opened.descriptor))] = opened
        return opened

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s cannot be locked (%s), so nothing keeps a second run from writing to the same directory",
                self._path,
                error.strerror or error,
            )


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
