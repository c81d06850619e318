"""The manifest of a generation: what belongs to it, with the hash of every file and of the manifest itself.

Hosts that do not share a directory have copies of a generation: all of them have its number and its id.
"""

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

FILE = "manifest.json"
FORMAT = 1
# The hash covers all bytes before this end, as they are: a flipped bit anywhere is seen, also in white space.
_END = re.compile(rb'",\n "sha256": "([0-9a-f]{64})"\n}\n\Z')


@dataclass(frozen=True)
class FileRecord:
    """What a file must be."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a generation consists of. `number` counts saves in the order of writing, and `id` is unlike any other.

    `compared` is how many ranks were found to hold the same state when it was saved. It is 1 in a world of one, which
    has nobody to compare with, and 0 where nothing was compared, as by versions that did not do it yet.
    """

    step: int
    number: int
    id: int
    world_size: int
    files: Mapping[str, FileRecord]
    model: Mapping[str, tuple[str, tuple[int, ...]]]  # dtype and shape of every tensor of the model's state
    versions: Mapping[str, str]
    compared: int = 0


def versions() -> dict[str, str]:
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
    told = end[1].decode()
    found = hashlib.sha256(raw[: end.start()]).hexdigest()
    if found != told:
        raise ValueError(f"its hash is {found[:12]}…, expected {told[:12]}…")
    fields = json.loads(raw)
    if fields["format"] != FORMAT:
        raise ValueError(f"it has format {fields['format']}, expected {FORMAT}")
    return _manifest(fields)


def _manifest(fields: dict[str, Any]) -> Manifest:
    return Manifest(
        step=fields["step"],
        number=fields["number"],
        id=fields["id"],
        world_size=fields["world_size"],
        files={name: FileRecord(**record) for name, record in fields["files"].items()},
        model={name: (dtype, tuple(shape)) for name, (dtype, shape) in fields["model"].items()},
        versions=fields["versions"],
        compared=fields.get("compared", 0),
    )
