"""The file format of failure capsules: all that is needed to rerun a step that failed.

It is a safetensors file, so that other tools read its tensors too. What is not a tensor is a JSON tree in the metadata
of the header, together with a SHA-256 of the whole file, in which the place of the hash itself counts as zeros. There
is no pickle: nothing that is read can run code.
"""

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from paceline.errors import CapsuleDamaged, Malformed, UsageError
from paceline.stored.directory import PRIVATE, replace_file
from paceline.stored.json_tree import Encoder, decode
from paceline.stored.tensor_file import TensorFile, bytes_of, file_parts
from paceline.stored.value_tree import MAX_DEPTH
from paceline.typed_json import UNREADABLE, parse_json, shown

FORMAT = "paceline capsule 1"
Kind = Literal["divergence", "not-finite", "crash"]
_KINDS = get_args(Kind)
UNKNOWN_ERROR = "backward raised"  # the `error` if the exception itself was not seen
_NO_HASH = "0" * 64


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": str(torch.__version__), "machine": platform.machine()}


@dataclass(frozen=True)
class Capsule:
    """What was known when a step failed.

    `batch`, `rng` and `settings` are nested dicts, lists and tuples of tensors, arrays and plain values. Anything else
    is left out when the capsule is written, and listed in `omitted`. Tensors are loaded on the CPU.
    """

    kind: Kind
    step: int
    ranks: tuple[int, ...]  # those at fault, as far as they are known
    error: str
    rank: int = 0  # the rank of this batch, randomness and state
    world_size: int = 1
    lanes: tuple[int, ...] = ()  # those of this rank
    seed: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # the settings that choose kernels
    versions: Mapping[str, str] = field(default_factory=versions)
    rng: Mapping[str, Any] | None = None  # by generator: "torch", "cuda", "python", "numpy"
    batch: Any = None  # a list with args, kwargs and rng of each microbatch (in lanes) or forward
    others: tuple[Mapping[str, Any], ...] = ()  # of other ranks: their rank, lanes, batch and rng
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    collectives: tuple[str, ...] = ()  # the last ones, oldest first
    omitted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise UsageError(f"kind: expected one of {', '.join(_KINDS)}, got {self.kind!r}")


def write_capsule(path: str | Path, capsule: Capsule) -> Path:
    """Write a capsule atomically and return its path. Raises OSError if that fails.

    A file of this name is replaced. The capsule holds the user's samples, so only the user can read it.

    The folder is created if it does not exist. Tensors in host memory are not copied, so they
    must not change before this returns.
    """
    path = Path(path)
    parts = _to_parts(capsule)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, parts, PRIVATE)
    return path


def read_capsule(path: str | Path) -> Capsule:
    """Read a capsule. Raises CapsuleDamaged if a byte of it has changed, or if it is something else."""
    path = Path(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        flat = torch.empty(size, dtype=torch.uint8, device="cpu")
        if size and (file.readinto(bytes_of(flat)) != size or file.read(1)):
            raise CapsuleDamaged(f"{path} changed size while it was being read")
    return _decoded(flat, path)


def _decoded(flat: torch.Tensor, path: Path) -> Capsule:
    try:
        found = TensorFile(flat)
        if found.metadata.get("kind") != FORMAT:
            raise ValueError(f"expected a file of kind {FORMAT!r}, got {found.metadata.get('kind')!r}")
        _check_hash(flat, str(found.metadata.get("sha256")))
        tree = parse_json(str(found.metadata["capsule"]), "a capsule")
        return _checked(Capsule(**decode(tree, found.__getitem__)))
    except UNREADABLE as error:
        raise CapsuleDamaged(
            f"{path} is not an intact failure capsule: {error}. Use an intact copy of it, or another rank's"
        ) from error


def _checked(capsule: Capsule) -> Capsule:
    """The capsule. Raises Malformed if a field is of another type than those that are written."""
    for name, fits in _FIELDS.items():
        if not fits(getattr(capsule, name)):
            raise Malformed(f"its {name} is {shown(repr(getattr(capsule, name)))}")
    return capsule


def _is_int(value: object) -> bool:
    return type(value) is int


def _holds(kind: type[Any], fits: Callable[[object], bool]) -> Callable[[Any], bool]:
    def hold(value: Any) -> bool:
        return isinstance(value, kind) and all(map(fits, value.values() if isinstance(value, dict) else value))

    return hold


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("step", "rank", "world_size"), _is_int),
    **dict.fromkeys(("ranks", "lanes"), _holds(tuple, _is_int)),
    **dict.fromkeys(("collectives", "omitted"), _holds(tuple, lambda value: isinstance(value, str))),
    "error": lambda value: isinstance(value, str),
    "seed": lambda value: value is None or _is_int(value),
    "settings": lambda value: isinstance(value, dict),
    "versions": _holds(dict, lambda value: isinstance(value, str)),
    "rng": lambda value: value is None or isinstance(value, dict),
    "others": _holds(tuple, lambda value: isinstance(value, dict)),
    "state": _holds(dict, lambda value: isinstance(value, torch.Tensor)),
}


def _to_parts(capsule: Capsule) -> list[bytes | memoryview]:
    encoder, omitted = Encoder(), list(capsule.omitted)
    tree = {
        one.name: encoder.encode(encodable(getattr(capsule, one.name), (one.name,), omitted), (one.name,))
        for one in fields(capsule)
        if one.name != "omitted"
    }
    tree["omitted"] = encoder.encode(tuple(omitted))
    head, body = file_parts(encoder.tensors, {"kind": FORMAT, "capsule": json.dumps(tree), "sha256": _NO_HASH})
    digest = hashlib.sha256(head)
    for part in body:
        digest.update(part)
    return [head.replace(_hash_field(_NO_HASH), _hash_field(digest.hexdigest())), *body]


def _check_hash(flat: torch.Tensor, expected: str) -> None:
    content = bytes_of(flat)
    length = 8 + int.from_bytes(content[:8], "little")
    head = bytes(content[:length])
    if head.count(_hash_field(expected)) != 1:
        raise ValueError("its header has no hash")
    digest = hashlib.sha256(head.replace(_hash_field(expected), _hash_field(_NO_HASH)))
    digest.update(content[length:])
    if digest.hexdigest() != expected:
        raise ValueError(f"its SHA-256 is {digest.hexdigest()[:12]}…, expected {expected[:12]}…")


def _hash_field(digest: str) -> bytes:
    """The field as the header holds it. In the tree, a JSON string there, a backslash precedes every quote."""
    return f'"sha256":"{digest}"'.encode()


def encodable(value: Any, path: tuple[str, ...], omitted: list[str]) -> Any:
    """The value with what cannot be stored replaced by None, and named in `omitted`: half a batch is better than no
    capsule."""
    if len(path) > MAX_DEPTH:
        omitted.append(f"{'.'.join(path[:3])}…: more than {MAX_DEPTH} levels")
        return None
    if isinstance(value, Mapping):
        plain = {key if _can_be_encoded(key) else repr(key): item for key, item in value.items()}
        return {key: encodable(item, (*path, str(key)), omitted) for key, item in plain.items()}
    if isinstance(value, list | tuple):
        inner = [encodable(item, (*path, str(number)), omitted) for number, item in enumerate(value)]
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
