"""Replicas start equal: the same model on every rank, then the same values.

The structure is compared before a single value moves, by messages whose size does not depend on the model: gloo ends
the process when ranks offer different sizes. Whatever differs is then an error on every rank.
"""

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from paceline import kernels
from paceline.collectives.api import Transport, Work
from paceline.collectives.wait import finish
from paceline.errors import ModelMismatch, ReplicasDiffer

logger = logging.getLogger("paceline")

CHUNK_BYTES = 250 * 1024 * 1024

Described = dict[str, Any]


def describe(named: Sequence[tuple[str, torch.Tensor]], settings: Mapping[str, object]) -> Described:
    """What must be equal on all ranks, as plain data."""
    return {
        "settings": {key: str(value) for key, value in settings.items()},
        "params": [_describe_one(name, p) for name, p in named],
    }


def _describe_one(name: str, p: torch.Tensor) -> list[Any]:
    if isinstance(p, torch.nn.parameter.UninitializedParameter):
        return [name, "uninitialized", str(p.dtype), "uninitialized", p.requires_grad]
    strides = list(p.stride()) if p.layout == torch.strided else []
    return [name, list(p.shape), str(p.dtype), strides, p.requires_grad]


def check_structure(mine: Described, transport: Transport, timeout_s: float | None) -> None:
    """Raise ModelMismatch on every rank when ranks described different models or settings."""
    if (described := _unless_equal(mine, "the comparison of models", transport, timeout_s)) is not None:
        raise ModelMismatch(_first_difference(described))


def warn_of_kernels(mine: dict[str, str], transport: Transport, timeout_s: float | None) -> None:
    """Warn on rank 0 of settings that may make the ranks' kernels compute other bits."""
    described = _unless_equal(mine, "the comparison of kernels", transport, timeout_s)
    if described is None or transport.rank != 0:
        return
    for rank, other in enumerate(described):
        if different := kernels.differences(described[0], other):
            logger.warning(
                "lanes give the same bits in every world only if all ranks run the same kernels, but ranks 0 and %d "
                "differ in %s; use the same versions, machines, threads and flags",
                rank,
                "; ".join(different),
            )
            return


def _unless_equal(mine: Described, what: str, transport: Transport, timeout_s: float | None) -> list[Described] | None:
    """What every rank described, or None if it is the same everywhere."""
    text = json.dumps(mine, sort_keys=True).encode()
    digest = hashlib.sha256(text).digest()
    head = torch.tensor([len(text), *digest], dtype=torch.int64, device="cpu")
    heads = torch.empty(transport.size * head.numel(), dtype=torch.int64, device="cpu")
    _wait(transport.all_gather(heads, head), what, transport, timeout_s)
    rows = heads.view(transport.size, -1).tolist()
    if all(row == rows[0] for row in rows):
        return None
    longest = max(row[0] for row in rows)
    padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = torch.empty(transport.size * longest, dtype=torch.uint8, device="cpu")
    _wait(transport.all_gather(texts, padded), what, transport, timeout_s)
    return [
        json.loads(bytes(texts[rank * longest : rank * longest + row[0]].tolist())) for rank, row in enumerate(rows)
    ]


def _first_difference(described: Sequence[Described]) -> str:
    base = described[0]
    for rank, other in enumerate(described):
        for key, value in base["settings"].items():
            if other["settings"].get(key) != value:
                return (
                    f"ranks wrapped the model with different settings: {key}={value} on rank 0, "
                    f"{key}={other['settings'].get(key)} on rank {rank}; pass the same arguments on every rank"
                )
        ours, theirs = base["params"], other["params"]
        if len(ours) != len(theirs):
            extra = _only_in(ours, theirs) or _only_in(theirs, ours)
            return (
                f"DDP expects same model across all ranks, but Rank 0 has {len(ours)} params and buffers, while rank "
                f"{rank} has {len(theirs)}; the first that is not on both: {extra}. "
                f"Build the model the same way on every rank"
            )
        for here, there in zip(ours, theirs, strict=True):
            if here[0] != there[0]:
                return (
                    f"parameters or buffers are registered in a different order, or under different names: where rank "
                    f"0 has {here[0]}, rank {rank} has {there[0]}; build the model the same way on every rank"
                )
            for what, a, b in zip(("shape", "dtype", "strides", "requires_grad"), here[1:], there[1:], strict=True):
                if a != b:
                    return (
                        f"ranks wrapped different models: {here[0]} has {what} {a} on rank 0 and {b} on rank {rank}; "
                        f"build the model the same way, with the same configuration, on every rank"
                    )
    raise AssertionError("digests differ but descriptions do not")


def _only_in(ours: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]) -> str | None:
    names = {row[0] for row in theirs}
    return next((str(row[0]) for row in ours if row[0] not in names), None)


def broadcast_values(
    tensors: Sequence[torch.Tensor], transport: Transport, timeout_s: float | None, *, root: int = 0
) -> None:
    """Overwrite `tensors` with those of rank `root`, in a few large messages."""
    for indices in _chunks(tensors):
        chunk = [tensors[i] for i in indices]
        flat = torch.cat([t.detach().reshape(-1) for t in chunk])
        _wait(transport.broadcast(flat, root), "the broadcast of parameters and buffers", transport, timeout_s)
        if transport.rank != root:
            _scatter_back(flat, chunk)


def verify_values(named: Sequence[tuple[str, torch.Tensor]], transport: Transport, timeout_s: float | None) -> None:
    """Compare every value with that of rank 0 and overwrite nothing; unequal replicas are an error on every rank."""
    first, largest, differing = len(named), 0.0, 0
    for indices in _chunks([t for _, t in named]):
        flat = torch.cat([named[i][1].detach().reshape(-1) for i in indices])
        theirs = flat.clone()
        _wait(transport.broadcast(theirs, 0), "the comparison of parameters", transport, timeout_s)
        sizes = [named[i][1].numel() for i in indices]
        for index, a, b in zip(indices, flat.split(sizes), theirs.split(sizes), strict=True):
            if not _same(a, b):
                first, differing = min(first, index), differing + 1
                largest = _worst([largest, _largest_difference(a, b)])
    mine = torch.tensor([float(first), largest, float(differing)], dtype=torch.float64, device="cpu")
    every = torch.empty(transport.size * 3, dtype=torch.float64, device="cpu")
    _wait(transport.all_gather(every, mine), "the comparison of parameters", transport, timeout_s)
    rows = every.view(transport.size, 3).tolist()
    ranks = [rank for rank, row in enumerate(rows) if row[2] > 0]
    if ranks:
        name = named[int(min(row[0] for row in rows))][0]
        verb = "differs" if len(ranks) == 1 else "differ"
        listed = ", ".join(str(rank) for rank in ranks)
        raise ReplicasDiffer(
            f'replicas must start equal (init="verify"), but rank{"s" if len(ranks) > 1 else ""} {listed} {verb} from '
            f"rank 0: the first parameter that differs is {name}, the largest difference is "
            f"{_worst([row[1] for row in rows]):g}, {int(max(row[2] for row in rows))} of {len(named)} tensors differ. "
            f'Either set the same seed before building the model, or pass init="broadcast" to start from rank 0\'s '
            f"values"
        )


def _worst(differences: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal values, or equal bits: a NaN in the same place is no difference."""
    return torch.equal(a, b) or torch.equal(a.clone().view(torch.uint8), b.clone().view(torch.uint8))


def _largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    wide = torch.complex128 if a.is_complex() else torch.float64
    return float((a.to(wide) - b.to(wide)).abs().max())  # NaN if there is one


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Indices of tensors of one dtype and device, in order, up to CHUNK_BYTES together."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(index)
    for group in groups.values():
        chunk: list[int] = []
        nbytes = 0
        for index in group:
            chunk.append(index)
            nbytes += tensors[index].numel() * tensors[index].element_size()
            if nbytes >= CHUNK_BYTES:
                yield chunk
                chunk, nbytes = [], 0
        if chunk:
            yield chunk


def _scatter_back(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        start = 0
        for tensor in tensors:
            tensor.detach().copy_(flat[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()


def _wait(work: Work, what: str, transport: Transport, timeout_s: float | None) -> None:
    finish(work, what=what, watch=transport.watch, timeout_s=timeout_s)
