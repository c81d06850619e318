"""Writing one generation, so that it is on disk whole or not at all."""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.generations import CHUNK, Generation, held, name_of, temporary
from paceline.checkpoint.manifest import FileRecord, Manifest
from paceline.stored.directory import fsync_directory, fsync_open_directory, make_directory

Parts = Sequence[bytes | memoryview]


def ignore(stage: object) -> None:
    """Who does not want to be told."""


def write_generation(
    directory: Path,
    manifest: Manifest,
    files: Mapping[str, Parts],
    *,
    reached: Callable[[str], None] = ignore,
    check: Callable[[], None] | None = None,
) -> Generation:
    """Write `files` and their manifest to a directory of their own, and give it its name when all is on disk.

    Raises OSError when that fails; then nothing of it is left. `reached` is told each stage before it is begun. `check`
    is called when all is written, and may still refuse it by raising.
    """
    reached("make the directory")
    make_directory(directory)
    name = name_of(directory, manifest.step)
    home = temporary(directory, name, "new")
    home.mkdir()
    try:
        with held(home) as descriptor:
            records = {}
            for file, parts in files.items():
                reached(f"write {file}")
                records[file] = write_file(home / file, parts, reached)
            complete = replace(manifest, files=records)
            reached("write the manifest")
            write_file(home / manifests.FILE, [manifests.to_bytes(complete)], reached)
            reached("fsync the directory")
            fsync_open_directory(descriptor)
            if check is not None:
                check()
            reached("rename")
            home.rename(directory / name)
    except BaseException:
        with suppress(OSError):  # the first error is the one to tell; the rest is removed by the next save
            shutil.rmtree(home)
        raise
    reached("fsync the parent")
    fsync_directory(directory)
    reached("done")
    return Generation(directory / name, manifest.step, complete)


def write_file(file: Path, parts: Parts, reached: Callable[[str], None] = ignore) -> FileRecord:
    """Write a new file and wait until it is on disk. It is hashed in the same pass, while pieces are in the cache."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        digest, size = hashlib.sha256(), 0
        for part in parts:
            view = memoryview(part)
            for begin in range(0, len(view), CHUNK):
                piece = view[begin : begin + CHUNK]
                digest.update(piece)
                size += len(piece)
                while len(piece):
                    piece = piece[os.write(descriptor, piece) :]
        reached(f"fsync {file.name}")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return FileRecord(size, digest.hexdigest())
