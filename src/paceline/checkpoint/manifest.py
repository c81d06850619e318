"""The manifest of a snapshot: what belongs to it, with the hashes of every file and of the manifest itself.

Hosts that do not share a directory have copies of a snapshot: all of them have its number and its id.
"""

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from paceline.stored.directory import FileRecord

FILE = "manifest.json"
FORMAT = 2
WHOLE_FILES = 1  # an older format, with one hash for every file
# The hash covers all bytes before this end, as they are: a flipped bit anywhere is seen, also in white space.
_END = re.compile(rb'",\n "sha256": "([0-9a-f]{64})"\n}\n\Z')


@dataclass(frozen=True)
class Manifest:
    """What a snapshot consists of. `number` counts saves in the order of writing, and `id` is unlike any other.

    `compared` is how many ranks were found to hold the same state when it was saved. It is 1 in a world of one, which
    has nobody to compare with, and 0 where nothing was compared, as by versions before this was done.
    """

    step: int
    number: int
    id: int
    world_size: int
    files: Mapping[str, FileRecord]
    model: Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape of every tensor of the model's state
    versions: Mapping[str, str]
    compared: int = 0


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
    """The manifest. Raises ValueError if a byte of it has changed."""
    end = _END.search(raw)
    if end is None:
        raise ValueError("it has no hash at its end")
    expected = end[1].decode()
    found = hashlib.sha256(raw[: end.start()]).hexdigest()
    if found != expected:
        raise ValueError(f"its hash is {found[:12]}…, expected {expected[:12]}…")
    fields = json.loads(raw)
    if fields["format"] not in (WHOLE_FILES, FORMAT):
        raise ValueError(f"it has format {fields['format']}, expected at most {FORMAT}; a newer paceline wrote it")
    files = {name: _record(**record) for name, record in fields["files"].items()}
    model = {name: (dtype, tuple(shape)) for name, (dtype, shape) in fields["model"].items()}
    known = ("step", "number", "id", "world_size", "versions")
    return Manifest(
        **{name: fields[name] for name in known}, files=files, model=model, compared=fields.get("compared", 0)
    )


def _record(size: int, sha256: str | list[str], chunk: int | None = None) -> FileRecord:
    """What the manifest says of a file. Without `chunk` the file has one hash."""
    found = FileRecord(size, max(size, 1), (sha256,)) if isinstance(sha256, str) else None
    found = found or FileRecord(size, int(chunk or 0), tuple(sha256))
    if found.chunk < 1 or len(found.sha256) != max(1, -(-found.size // found.chunk)):
        raise ValueError(f"it has {len(found.sha256)} hashes of chunks of {found.chunk} bytes for {size} bytes")
    return found
