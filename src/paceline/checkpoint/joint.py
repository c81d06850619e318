"""Several ranks write one snapshot to a shared directory, and the lowest rank completes it.

Everything goes through files, because threads write them and the process may be about to end: there is no collective
and no store of another process to wait for. Each rank has a record in the temporary directory, and holds a lock on it
until it has ended or finished. At the end the record says what it has written, or why it could not.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.checkpoint.checkpoint_errors import CheckpointError
from paceline.errors import Malformed
from paceline.stored.directory import PRIVATE, FileRecord, make_directory
from paceline.typed_json import read_json

STALLED_S = 600.0  # a rank that writes nothing for this long counts as dead where locks cannot show whether it lives
ORPHAN_S = 5.0  # the same, once the group that it was in has ended
LONGEST_PAUSE_S = 0.05


@dataclass(frozen=True)
class RankRecord:
    """What a rank has written, and its error, if any."""

    files: Mapping[str, FileRecord]
    problem: str


def _said(rank: int, text: bytes) -> RankRecord:
    try:
        return read_json(RankRecord, text, f"the record of rank {rank}")
    except Malformed as error:
        raise CheckpointError(f"{error}; only the ranks of this run may write to its checkpoints") from error


class JointWrite:
    """One rank's part in a write of the ranks `team`, in ascending order, to the temporary directory `home`."""

    def __init__(self, home: Path, team: Sequence[int], rank: int) -> None:
        self.home = home
        self.leads = rank == team[0]
        self.descriptor = -1  # of the directory
        self._rank = rank
        self._others = [other for other in team if other != rank]
        self._record = -1  # its descriptor
        self.patience_s = STALLED_S  # may become less while ranks are waited for

    def enter(self) -> None:
        """Announce that this rank is about to write. All ranks of the team do so before one of them waits for
        others."""
        make_directory(self.home.parent)
        self.home.mkdir(exist_ok=True)
        self.descriptor = os.open(self.home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # in use: not abandoned
        except OSError as error:
            _check_only_unsupported(error)
        self._record = os.open(
            self._path_of(self._rank), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE
        )
        _lock(self._record)

    def leave(self, files: dict[str, FileRecord], problem: str) -> None:
        """Record what this rank has written, or why it could not."""
        text = json.dumps(asdict(RankRecord(files, problem)))
        try:
            os.pwrite(self._record, f"{text}\n".encode(), 0)
        finally:
            self.close()

    def close(self) -> None:
        """Release the directory, whether the write succeeded or not."""
        for descriptor in (self._record, self.descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self._record = self.descriptor = -1

    def collect(self) -> tuple[dict[str, FileRecord], str]:
        """What the others have written, and what went wrong. Returns when no rank is writing any more."""
        files: dict[str, FileRecord] = {}
        problems = []
        for rank in self._others:
            text = self._wait_for(rank)
            told = _said(rank, text) if text else RankRecord({}, "it ended while it was writing")
            files.update(told.files)
            if told.problem:
                problems.append(f"rank {rank} could not write its part: {told.problem}")
        return files, "; ".join(problems)

    def remove_records(self) -> None:
        """Remove everything from the directory but the files of the snapshot."""
        for rank in (self._rank, *self._others):
            self._path_of(rank).unlink()

    def _path_of(self, rank: int) -> Path:
        return self.home / f".rank-{rank:05d}"

    def _wait_for(self, rank: int) -> bytes:
        """The record of a rank, or nothing if it has ended without one."""
        record, pause, size, grown_at = self._path_of(rank), 0.001, -1, time.monotonic()
        while True:
            # Opened each time: other machines see what was written when a file is opened.
            descriptor = os.open(record, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                alive = not _lock(descriptor)
                text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            finally:
                os.close(descriptor)
            if text.endswith(b"\n"):
                return text
            if not alive:
                return b""
            if (grown := _size_of(self.home)) != size:
                size, grown_at = grown, time.monotonic()
            if time.monotonic() > grown_at + self.patience_s:
                raise CheckpointError(f"rank {rank} has written nothing for {self.patience_s:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


def _lock(descriptor: int) -> bool:
    """Lock a file for this process; forked processes do not inherit the lock. Where files cannot be locked, behave as
    if another process held the lock."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            _check_only_unsupported(error)
        return False
    return True


def _check_only_unsupported(error: OSError) -> None:
    if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
        raise error


def _size_of(directory: Path) -> int:
    return sum(entry.stat().st_size for entry in os.scandir(directory))
