"""The manifest of a snapshot: its contents, with the hashes of every file and of the manifest itself.

Hosts that do not share a directory have a manifest each, of the files that their ranks have written: all with the same
number and id. When the files of several hosts are put into one directory, that directory holds all of it.
"""

import hashlib
import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as fields_of
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from paceline.errors import Malformed
from paceline.stored.directory import FileRecord
from paceline.typed_json import parse_json, shown, typed

FILE = "manifest.json"
NAME = re.compile(r"manifest(?:-\d{5,})?\.json\Z")
FORMAT = 3
ONE_WRITER = 2  # an older format, in which rank 0 wrote everything
WHOLE_FILES = 1  # an older one with a single hash per file
# The hash covers all bytes before this ending, so a flipped bit is detected anywhere, even in white space.
_END = re.compile(rb'",\n "sha256": "([0-9a-f]{64})"\n}\n\Z')


@dataclass(frozen=True)
class Manifest:
    """What a snapshot consists of. `number` counts saves in the order of writing, and `id` is unique.

    `compared` is how many ranks were found to hold the same state when it was saved. It is 1 in a world of one, which
    has nothing to compare, and 0 if nothing was compared, as in older versions.
    """

    step: int
    number: int
    id: int
    world_size: int
    files: Mapping[str, FileRecord]
    model: Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape of every tensor of the model's state
    versions: Mapping[str, str]
    compared: int = 0
    ranks: tuple[int, ...] = (0,)  # that wrote the files
    metric: float | None = None


def file_name(name: str, rank: int) -> str:
    """The name of a rank's file: plain for rank 0, so that a world of one has `model.safetensors`."""
    stem, _, suffix = name.partition(".")
    return name if rank == 0 else f"{stem}-{rank:05d}.{suffix}"


def stem_of(file: str) -> str:
    """The name of rank 0's file of the same kind."""
    return re.sub(r"-\d{5,}(?=\.)", "", file)


def merged(manifests: Sequence[Manifest]) -> Manifest:
    """The manifests of several hosts as one. Raises Malformed if they are not of the same snapshot."""
    first, *others = manifests
    if any((one.number, one.id) != (first.number, first.id) for one in others):
        raise Malformed("there are manifests of different snapshots; keep the files of one snapshot per directory")
    files = {name: record for one in reversed(manifests) for name, record in one.files.items()}
    return replace(first, files=files, ranks=tuple(sorted({rank for one in manifests for rank in one.ranks})))


@cache
def versions() -> Mapping[str, str]:
    try:
        own = version("paceline")
    except PackageNotFoundError:
        own = "not installed"
    return {"paceline": own, "python": platform.python_version(), "torch": str(torch.__version__)}


def to_bytes(manifest: Manifest) -> bytes:
    fields = {"format": FORMAT, **asdict(manifest), "kind": "paceline checkpoint"}
    body = json.dumps(fields, indent=1).encode().removesuffix(b'"\n}')
    return body + f'",\n "sha256": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def from_bytes(raw: bytes) -> Manifest:
    """Parse a manifest. Raises Malformed if a byte of it has changed, or if it is not a manifest."""
    end = _END.search(raw)
    if end is None:
        raise Malformed("it does not end with a hash")
    expected = end[1].decode()
    found = hashlib.sha256(raw[: end.start()]).hexdigest()
    if found != expected:
        raise Malformed(f"its hash is {found[:12]}…, expected {expected[:12]}…")
    fields = parse_json(raw, "a manifest")
    if not isinstance(fields, dict) or fields.get("format") not in (WHOLE_FILES, ONE_WRITER, FORMAT):
        known = fields.get("format") if isinstance(fields, dict) else fields
        raise Malformed(f"it has format {shown(known)}, expected at most {FORMAT}; it was written by a newer paceline")
    written = typed(_Written, {name: fields[name] for name in fields.keys() & _NAMES}, "a manifest")
    if bad := next((name for name in written.files if not _FILE_NAME.fullmatch(name)), None):
        raise Malformed(f"it lists a file {shown(bad)!r} outside the snapshot; expected plain file names")
    files = {name: _record(**asdict(record)) for name, record in written.files.items()}
    return Manifest(**{**{name: getattr(written, name) for name in _NAMES}, "files": files})


@dataclass(frozen=True)
class _WrittenFile:
    """The entry of a file in a manifest of any format."""

    size: int
    sha256: str | tuple[str, ...]
    chunk: int | None = None


@dataclass(frozen=True)
class _Written:
    """A manifest of any format, as it was written."""

    step: int
    number: int
    id: int
    world_size: int
    files: Mapping[str, _WrittenFile]
    model: Mapping[str, tuple[str, tuple[int, ...]]]
    versions: Mapping[str, str]
    compared: int = 0
    ranks: tuple[int, ...] = (0,)
    metric: float | None = None


_NAMES = frozenset(one.name for one in fields_of(Manifest))
_FILE_NAME = re.compile(r"(?!\.{1,2}\Z)[^/\0\ud800-\udfff]{1,255}", re.DOTALL)


def _record(size: int, sha256: str | tuple[str, ...], chunk: int | None = None) -> FileRecord:
    """The manifest's entry of a file. Without `chunk` the file has one hash."""
    found = FileRecord(size, max(size, 1), (sha256,)) if isinstance(sha256, str) else None
    found = found or FileRecord(size, int(chunk or 0), tuple(sha256))
    if size < 0 or found.chunk < 1 or len(found.sha256) != max(1, -(-found.size // found.chunk)):
        raise Malformed(f"it has {len(found.sha256)} hashes of chunks of {found.chunk} bytes for {size} bytes")
    return found
