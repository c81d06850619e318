"""The snapshots in a directory: finding, verifying and removing them."""

import fcntl
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.checkpoint_errors import Damaged
from paceline.checkpoint.manifest import Manifest

PROBE = re.compile(r"\.seen-[0-9a-f]+-\d+\Z")
NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?\Z")
TEMPORARY = re.compile(r"\.step-.*\.(?:new|old)-[0-9a-f]{16}\Z")
MAX_MANIFEST = 1 << 28
PROBE_S = 3600.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Snapshot:
    """A snapshot on disk: its path, and its manifest."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def key(self) -> tuple[int, int]:
        """Orders snapshots by age; equal for copies of one, on hosts that do not share a directory."""
        return self.manifest.number, self.manifest.id


def name_of(directory: Path, step: int) -> str:
    """A free name for a snapshot of this step. Nothing is ever overwritten."""
    name, again = f"step-{step:08d}", 0
    while os.path.lexists(directory / name):
        again += 1
        name = f"step-{step:08d}.{again}"
    return name


def temporary(directory: Path, name: str, word: str) -> Path:
    return directory / f".{name}.{word}-{secrets.token_hex(8)}"


def listed(directory: Path) -> list[Path]:
    """Everything in the directory that is named like a snapshot. Raises OSError if it cannot be listed."""
    try:
        return sorted(path for path in directory.iterdir() if NAME.match(path.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def read(path: Path) -> Snapshot:
    """Read the manifests in `path`, but no other files. Raises Damaged."""
    try:
        names = sorted(entry.name for entry in os.scandir(path) if manifests.NAME.match(entry.name))
    except OSError as error:
        raise Damaged(path, f"{manifests.FILE} cannot be read: {error.strerror}") from error
    found = [_manifest(path, name) for name in names or [manifests.FILE]]
    try:
        manifest = manifests.merged(found)
    except ValueError as error:
        raise Damaged(path, str(error)) from error
    return Snapshot(path, manifest)


def _manifest(path: Path, name: str) -> Manifest:
    file = path / name
    descriptor, size = open_file(file)
    try:
        if size > MAX_MANIFEST:
            raise Damaged(path, f"{name} has {size} bytes, expected at most {MAX_MANIFEST}")
        with open(descriptor, "rb", closefd=False) as opened:
            raw = opened.read()
    except OSError as error:
        raise Damaged(path, f"{name} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    try:
        return manifests.from_bytes(raw)
    except ValueError as error:
        raise Damaged(path, f"{name}: {error}") from error


def survey(directory: Path) -> tuple[list[Snapshot], list[Damaged]]:
    """The snapshots whose manifests are whole, newest first, and those whose manifests are not."""
    found, broken = [], []
    for path in listed(directory):
        try:
            found.append(read(path))
        except Damaged as error:
            broken.append(error)
    return sorted(found, key=lambda snapshot: snapshot.key, reverse=True), broken


def has_all_files(snapshot: Snapshot) -> bool:
    """Whether all files are there with their sizes; cheap, and sufficient to decide what to keep."""
    for name, record in snapshot.manifest.files.items():
        try:
            if (snapshot.path / name).lstat().st_size != record.size:
                return False
        except OSError:
            return False
    return True


def open_file(file: Path) -> tuple[int, int]:
    """A descriptor of a file of a snapshot, and its size. Raises Damaged.

    Opening a fifo would wait for a writer. A link is refused: it leads out of the snapshot.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Damaged(file.parent, f"{file.name} cannot be read: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise Damaged(file.parent, f"{file.name} is not a regular file")
    return descriptor, status.st_size


def place_of(snapshot: Snapshot) -> str:
    """A text that is equal on ranks of one host that read the same files."""
    host = BOOT_ID.read_text().strip() if BOOT_ID.exists() else socket.gethostname()
    try:
        status = snapshot.path.stat()
    except OSError:  # it has just been removed, which reading its files will show
        return f"{host} process {os.getpid()}"
    return f"{host} {status.st_dev} {status.st_ino}"


def remove(path: Path) -> None:
    """Remove a snapshot. It is renamed first, so that a partial one is never visible."""
    aside = temporary(path.parent, path.name, "old")
    path.rename(aside)
    with suppress(FileNotFoundError):  # another run in this directory has removed it as abandoned
        shutil.rmtree(aside)


def step_of(path: Path) -> int:
    """The step in the name of a snapshot, -1 in other names."""
    match = NAME.match(path.name)
    return int(match[1]) if match else -1


@contextmanager
def held(path: Path) -> Iterator[int]:
    """Mark a temporary directory as in use until this process ends. Yields its descriptor."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks: then no other process can take it for abandoned
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)


def remove_abandoned(directory: Path) -> list[Path]:
    """Remove what killed processes left: half-written snapshots, and old probes. Returns what was removed."""
    gone = []
    for path in directory.iterdir():
        if PROBE.match(path.name) and _age_s(path) > PROBE_S:
            path.unlink(missing_ok=True)
            gone.append(path)
        if TEMPORARY.match(path.name) and _is_abandoned(path):
            with suppress(FileNotFoundError):
                shutil.rmtree(path)
            gone.append(path)
    return gone


def remove_unfinished(directory: Path) -> None:
    """Remove all half-written snapshots, also those that somebody still writes: they never get their names."""
    for path in [path for path in directory.iterdir() if TEMPORARY.match(path.name)]:
        aside = path.with_name(f"{path.name}.old-{secrets.token_hex(8)}")
        with suppress(FileNotFoundError):  # it has just got its name
            path.rename(aside)
            shutil.rmtree(aside)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:  # its rank has just removed it
        return 0.0


def _is_abandoned(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)
