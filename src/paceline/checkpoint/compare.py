"""Comparing state: of runs, by one hash; of the ranks of a run, by a digest of every tensor before it is saved."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from paceline.agree.drift import Drift, TensorDrift, groups_of
from paceline.agree.state_digest import start_digest
from paceline.bare import bare
from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.ranks import OptionalGroup, gather, text_hash
from paceline.checkpoint.state import Tensors, state_of
from paceline.errors import ReplicaDrift
from paceline.stored.json_tree import Encoder
from paceline.stored.tensor_file import bytes_of
from paceline.stored.value_tree import dtype_name

Digests = tuple[int, ...]


def tensor_digests(tensors: Tensors) -> Digests:
    """A digest of each tensor, whatever device it is on: where ranks differ, these say in which tensors."""
    started = [start_digest([tensor]) for tensor in tensors.values()]
    return tuple(one.value() for one in started)


def compare(step: int, parts: Sequence[Tensors], group: OptionalGroup) -> list[Digests]:
    """Raise ReplicaDrift on all ranks unless all hold the same bits. Returns the digests of each part.

    A part that is not made of the same tensors on all ranks, such as the state of a sharded optimizer, has nothing that
    could be compared.
    """
    digests = [tensor_digests(tensors) for tensors in parts]
    signatures = gather([_signature(tensors) for tensors in parts], group)
    alike = [number for number, same in enumerate(zip(*signatures, strict=True)) if len(set(same)) == 1]
    names = [name for number in alike for name in parts[number]]
    own = [digest for number in alike for digest in digests[number]]
    if len(set(gather(text_hash(repr(own)), group))) == 1:
        return digests
    by_tensor = [groups_of(column) for column in zip(*gather(own, group), strict=True)]
    drifted = tuple(TensorDrift(names[n], n, groups) for n, groups in enumerate(by_tensor) if len(groups) > 1)
    found = Drift(step, len(signatures), len(names), drifted, None)
    raise ReplicaDrift(f"step {step} is not saved: {found.text}", ranks=found.ranks, tensor=drifted[0].name, step=step)


def check_copy(parts: Sequence[Tensors], digests: Sequence[Digests]) -> None:
    """Raise CheckpointError if a copy of the parts is not what ranks have compared."""
    for tensors, expected in zip(parts, digests, strict=True):
        found = tensor_digests(tensors)
        changed = [name for name, old, new in zip(tensors, expected, found, strict=True) if old != new]
        if changed:
            raise CheckpointError(
                f"the copy of {changed[0]} in host memory does not match what the ranks compared: it changed before it "
                f"was written; test the memory of this machine"
            )


def _signature(tensors: Tensors) -> str:
    return text_hash(repr([(name, tuple(one.shape), str(one.dtype)) for name, one in tensors.items()]))


def digest(model: nn.Module | None, optimizer: torch.optim.Optimizer | None, step: int, cursor: Any = None) -> str:
    """The SHA-256 of parameters, buffers, optimizer state, step and sample cursor, as 64 hexadecimal digits.

    `cursor` is a plain value or has a state_dict(). Names, dtypes, shapes and bytes are hashed in the order of names,
    so the same state gives the same digest on any device, in any wrapper, before and after a checkpoint.
    """
    state = {
        "model": None if model is None else bare(model).state_dict(),
        "optimizer": None if optimizer is None else optimizer.state_dict(),
        "step": step,
        "cursor": state_of(cursor),
    }
    found = hashlib.sha256()
    for path, value in sorted(_leaves(state, ""), key=lambda leaf: leaf[0]):
        if isinstance(value, torch.Tensor):
            host = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
            found.update(f"{path} {dtype_name(host.dtype)} {list(host.shape)}\n".encode())
            found.update(bytes_of(host))
        else:
            found.update(f"{path} {json.dumps(value)}\n".encode())
    return found.hexdigest()


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}/{key!r}")
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index:08d}")
    elif isinstance(value, torch.Tensor):
        yield path, value
    else:
        encoder = Encoder()
        yield path, encoder.encode(value)
        for name, tensor in encoder.tensors.items():  # of numpy
            yield f"{path}/{name}", tensor
