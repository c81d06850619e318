"""A failure capsule: one file with all that is needed to run the step that went wrong again.

It is a safetensors file, so that other tools read its tensors too. What is not a tensor is a JSON tree in the metadata
of the header, together with a SHA-256 of the whole file, in which the place of the hash itself counts as zeros. There
is no pickle: nothing that is read can run code.
"""

import hashlib
import json
import os
import platform
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from paceline.errors import CapsuleDamaged, UsageError
from paceline.stored.tensor_file import Layout, TensorFile, bytes_of, lay_out
from paceline.stored.tree import Encoder, decode

FORMAT = "paceline capsule 1"
Kind = Literal["divergence", "not-finite", "crash"]
_KINDS = get_args(Kind)
UNKNOWN_ERROR = "backward raised"  # as `error`, where what it raised was not seen
_NO_HASH = "0" * 64
_MAX_DEPTH = 100


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": str(torch.__version__), "machine": platform.machine()}


@dataclass(frozen=True)
class Capsule:
    """What was known when a step went wrong.

    `batch`, `rng` and `settings` are nested dicts, lists and tuples of tensors, arrays and plain values. What else they
    hold is left out when the capsule is written, and named in `omitted`. Tensors come back on the CPU.
    """

    kind: Kind
    step: int
    ranks: tuple[int, ...]  # those at fault, as far as they are known
    error: str
    rank: int = 0  # whose batch, randomness and state this is
    world_size: int = 1
    lanes: tuple[int, ...] = ()  # those of this rank
    seed: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # what decides which kernels run
    versions: Mapping[str, str] = field(default_factory=versions)
    rng: Mapping[str, Any] | None = None  # by generator: "torch", "cuda", "python", "numpy"
    batch: Any = None  # in lanes a list of their micros; else one of the forwards: args, kwargs and rng
    others: tuple[Mapping[str, Any], ...] = ()  # of other ranks: their rank, lanes, batch and rng
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    collectives: tuple[str, ...] = ()  # the last ones, oldest first
    omitted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise UsageError(f"kind: expected one of {', '.join(_KINDS)}, got {self.kind!r}")


def write_capsule(path: str | Path, capsule: Capsule) -> Path:
    """Write a capsule, on disk whole or not at all, and return its path. Raises OSError if that fails.

    A file of this name is replaced. The folder is made if it is not there. Tensors of the host are not copied, so they
    must not change before this returns.
    """
    path = Path(path)
    head, body = _to_parts(capsule)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new-{secrets.token_hex(8)}")
    try:
        with new.open("xb") as file:
            file.write(head)
            for tensor in body:
                file.write(bytes_of(tensor))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        with suppress(OSError):  # the first error is the one to tell
            new.unlink()
        raise
    _fsync_folder(path.parent)
    return path


def read_capsule(path: str | Path) -> Capsule:
    """Read a capsule. Raises CapsuleDamaged if a byte of it has changed, or if it is something else."""
    path = Path(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        flat = torch.empty(size, dtype=torch.uint8, device="cpu")
        if size and (file.readinto(bytes_of(flat)) != size or file.read(1)):
            raise CapsuleDamaged(f"{path} changed its size while it was read")
    return _decoded(flat, str(path))


def capsule_bytes(capsule: Capsule) -> bytes:
    """What `write_capsule` would write."""
    head, body = _to_parts(capsule)
    return b"".join([head, *(bytes_of(tensor) for tensor in body)])


def capsule_from(raw: bytes) -> Capsule:
    """The reverse of `capsule_bytes`."""
    return _decoded(torch.frombuffer(bytearray(raw), dtype=torch.uint8), "what another rank has sent")


def _decoded(flat: torch.Tensor, path: str) -> Capsule:
    try:
        found = TensorFile(flat)
        if found.metadata.get("kind") != FORMAT:
            raise ValueError(f"expected a file of kind {FORMAT!r}, got {found.metadata.get('kind')!r}")
        _check_hash(flat, str(found.metadata.get("sha256")))
        tree = decode(json.loads(str(found.metadata["capsule"])), found.__getitem__)
        return Capsule(**tree)
    except (ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        raise CapsuleDamaged(
            f"{path} is not a whole failure capsule: {error}. Use a copy of it that is, or another rank's"
        ) from error


def _to_parts(capsule: Capsule) -> tuple[bytes, list[torch.Tensor]]:
    """The header, and the tensors whose bytes follow it."""
    encoder, omitted = Encoder(), list(capsule.omitted)
    tree = {
        one.name: encoder.encode(_kept(getattr(capsule, one.name), (one.name,), omitted), (one.name,))
        for one in fields(capsule)
        if one.name != "omitted"
    }
    tree["omitted"] = encoder.encode(tuple(omitted))
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in encoder.tensors.items()}
    layout = lay_out(tensors, {"kind": FORMAT, "capsule": json.dumps(tree), "sha256": _NO_HASH})
    body = [tensors[entry.name] for entry in layout.entries]
    digest = hashlib.sha256(layout.head)
    for tensor in body:
        digest.update(bytes_of(tensor))
    return _with_hash(layout, digest.hexdigest()), body


def _with_hash(layout: Layout, digest: str) -> bytes:
    head = layout.head.replace(_hash_field(_NO_HASH), _hash_field(digest))
    if head == layout.head or len(head) != len(layout.head):
        raise AssertionError("the header has no place for the hash")
    return head


def _check_hash(flat: torch.Tensor, told: str) -> None:
    content = bytes_of(flat)
    length = 8 + int.from_bytes(content[:8], "little")
    head = bytes(content[:length])
    if head.count(_hash_field(told)) != 1:
        raise ValueError("its header has no hash")
    digest = hashlib.sha256(head.replace(_hash_field(told), _hash_field(_NO_HASH)))
    digest.update(content[length:])
    if digest.hexdigest() != told:
        raise ValueError(f"its SHA-256 is {digest.hexdigest()[:12]}…, expected {told[:12]}…")


def _hash_field(digest: str) -> bytes:
    """As it stands in the header. In the tree, which is a JSON string there, every quote has a backslash before it."""
    return f'"sha256":"{digest}"'.encode()


def _kept(value: Any, path: tuple[str, ...], omitted: list[str]) -> Any:
    """The value with what cannot be kept replaced by None: half a batch is better than no capsule."""
    if len(path) > _MAX_DEPTH:
        omitted.append(f"{'.'.join(path[:3])}…: more than {_MAX_DEPTH} levels")
        return None
    if isinstance(value, Mapping):
        plain = {key if _can_be_encoded(key) else repr(key): item for key, item in value.items()}
        return {key: _kept(item, (*path, str(key)), omitted) for key, item in plain.items()}
    if isinstance(value, list | tuple):
        inner = [_kept(item, (*path, str(number)), omitted) for number, item in enumerate(value)]
        return inner if isinstance(value, list) else value if type(value) is torch.Size else tuple(inner)
    if _can_be_encoded(value):
        return value
    omitted.append(f"{'.'.join(path)}: a {type(value).__module__}.{type(value).__qualname__}")
    return None


def _can_be_encoded(value: Any) -> bool:
    try:
        Encoder().encode(value)
    except Exception:  # noqa: BLE001 (a tensor of another kind than those known raises what it likes)
        return False
    return True


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # not every file system knows this of directories, and the file itself is on disk
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
