"""The generations in a directory: found, compared with their manifests byte for byte, and removed."""

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.faults import Damaged
from paceline.checkpoint.manifest import FileRecord, Manifest
from paceline.stored.tensor_file import bytes_of

PROBE = re.compile(r"\.seen-[0-9a-f]+-\d+\Z")
NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?\Z")
TEMPORARY = re.compile(r"\.step-.*\.(?:new|old)-[0-9a-f]{16}\Z")
CHUNK = 1 << 20
MAX_MANIFEST = 1 << 28
PROBE_S = 3600.0


@dataclass(frozen=True)
class Generation:
    """A generation on disk: where it is, its step, and what its manifest says."""

    path: Path
    step: int
    manifest: Manifest

    @property
    def key(self) -> tuple[int, int]:
        """Orders generations by age; equal for copies of one, on hosts that do not share a directory."""
        return self.manifest.number, self.manifest.id


def name_of(directory: Path, step: int) -> str:
    """A free name for a generation of this step. Nothing is ever written over."""
    name, again = f"step-{step:08d}", 0
    while os.path.lexists(directory / name):
        again += 1
        name = f"step-{step:08d}.{again}"
    return name


def temporary(directory: Path, name: str, word: str) -> Path:
    return directory / f".{name}.{word}-{secrets.token_hex(8)}"


def listed(directory: Path) -> list[Path]:
    """Everything in the directory that is named like a generation. Raises OSError if it cannot be listed."""
    try:
        return sorted(path for path in directory.iterdir() if NAME.match(path.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def read(path: Path) -> Generation:
    """What the manifest in `path` says; the other files are not looked at. Raises Damaged."""
    raw = _read(path / manifests.FILE)
    try:
        manifest = manifests.from_bytes(raw.tobytes())
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(path, f"{manifests.FILE}: {error}") from error
    if any(Path(name).name != name for name in manifest.files):
        raise Damaged(path, f"{manifests.FILE} names files outside of the generation")
    return Generation(path, manifest.step, manifest)


def survey(directory: Path) -> tuple[list[Generation], list[Damaged]]:
    """The generations whose manifests are whole, newest first, and those whose manifests are not."""
    found, broken = [], []
    for path in listed(directory):
        try:
            found.append(read(path))
        except Damaged as error:
            broken.append(error)
    return sorted(found, key=lambda generation: generation.key, reverse=True), broken


def verify(generation: Generation) -> None:
    """Compare every byte. Raises Damaged."""
    scratch = memoryview(bytearray(CHUNK))
    for name, record in generation.manifest.files.items():
        _read(generation.path / name, record, scratch)


def content(generation: Generation) -> dict[str, torch.Tensor]:
    """The bytes of all files, each compared with the manifest. Raises Damaged."""
    files = {}
    for name, record in generation.manifest.files.items():
        flat = torch.empty(record.size, dtype=torch.uint8, device="cpu")
        _read(generation.path / name, record, bytes_of(flat))
        files[name] = flat
    return files


def has_all_files(generation: Generation) -> bool:
    """Whether all files are there with their sizes; cheap, and enough to decide what to keep."""
    for name, record in generation.manifest.files.items():
        try:
            if (generation.path / name).lstat().st_size != record.size:
                return False
        except OSError:
            return False
    return True


def _read(file: Path, record: FileRecord | None = None, memory: memoryview | None = None) -> memoryview:
    """Read a file into memory; if that is smaller, piece by piece over itself. Raises Damaged."""
    try:
        # Not blocking: opening a fifo would wait for someone to write.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise Damaged(file.parent, f"{file.name} cannot be opened: {error.strerror}") from error
    try:
        return _read_open(descriptor, file, record, memory)
    except OSError as error:
        raise Damaged(file.parent, f"{file.name} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def _read_open(descriptor: int, file: Path, record: FileRecord | None, memory: memoryview | None) -> memoryview:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(file.parent, f"{file.name} is not a regular file")
    size = status.st_size
    if record is None and size > MAX_MANIFEST:
        raise Damaged(file.parent, f"{file.name} has {size} bytes, expected at most {MAX_MANIFEST}")
    if record is not None and size != record.size:
        raise Damaged(file.parent, f"{file.name} has {size} bytes, expected {record.size}")
    if memory is None:
        memory = memoryview(bytearray(size))
    digest, at = hashlib.sha256(), 0
    while at < size:
        start = at if len(memory) >= size else 0
        count = os.readv(descriptor, [memory[start : start + CHUNK]])
        if count == 0:
            raise Damaged(file.parent, f"{file.name} ended after {at} bytes, expected {size}")
        digest.update(memory[start : start + count])
        at += count
    if record is not None and digest.hexdigest() != record.sha256:
        found, expected = digest.hexdigest()[:12], record.sha256[:12]
        raise Damaged(file.parent, f"{file.name} has changed: its SHA-256 is {found}…, expected {expected}…")
    return memory


def remove(path: Path) -> None:
    """Remove a generation. It loses its name first, so that no half of one is ever seen."""
    aside = temporary(path.parent, path.name, "old")
    path.rename(aside)
    with suppress(FileNotFoundError):  # another run in this directory took it for abandoned
        shutil.rmtree(aside)


def remove_older(directory: Path, keep: int, refused: Sequence[Path]) -> list[Path]:
    """Remove all that is older than the `keep` newest good generations, of different steps. Returns what went.

    `refused` are known to be damaged and do not count as good.
    """
    found, broken = survey(directory)
    good = [one for one in found if one.path not in refused and has_all_files(one)]
    kept: dict[int, Generation] = {}
    for generation in good:
        if len(kept) < keep:
            kept.setdefault(generation.step, generation)
    if len(kept) < keep:
        # Too few: what may still be of use stays, except older copies of a step that is kept.
        gone = [one.path for one in good if one.step in kept and one is not kept[one.step]]
    else:
        oldest = min(one.manifest.number for one in kept.values())
        stay = {one.path for one in kept.values()}
        gone = [one.path for one in found if one.path not in stay and one.manifest.number < oldest]
        gone += [one.path for one in good if one.step in kept and one.path not in stay and one.path not in gone]
        least = min(kept)
        gone += [error.path for error in broken if step_of(error.path) < least]
    for path in gone:
        remove(path)
    return gone


def step_of(path: Path) -> int:
    """The step in the name of a generation, -1 in other names."""
    match = NAME.match(path.name)
    return int(match[1]) if match else -1


@contextmanager
def held(path: Path) -> Iterator[int]:
    """Marks a temporary directory as in use by this process, until it ends in whatever way. Gives its descriptor."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks: then nobody else can take it for abandoned either
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)


def remove_abandoned(directory: Path) -> list[Path]:
    """Remove what killed processes left: half-written generations, and old probes. Returns what went."""
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
