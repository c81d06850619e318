"""Replicas start equal: the same model on every rank, then the same values. The same holds for those that continue in a
new group.

The structure is compared before a single value moves, by messages whose size does not depend on the model: gloo ends
the process when ranks offer different sizes. Any difference is then an error on every rank.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from paceline import kernels
from paceline.agree.drift import locate, spread
from paceline.agree.state_digest import Piece, state_digest
from paceline.collectives.gather import gather_ints, gather_unless_equal
from paceline.collectives.group import Group
from paceline.errors import ModelMismatch, ReplicasDiffer
from paceline.placement import find_units
from paceline.reducer.step import StepState
from paceline.replica import arguments
from paceline.replica.monitor import ReplicaMonitor

logger = logging.getLogger("paceline")

CHUNK_BYTES = 64 * 1024 * 1024  # a rank holds two copies of a chunk for a moment


def check_same_model(replica: Any, init: str) -> None:
    """Raise ModelMismatch on every rank if modules or settings differ between ranks."""
    settings = replica._settings
    told = {
        "init": init,
        "overlap": settings.overlap,
        "unused": settings.unused,
        "bucket sizes": settings.caps.caps,
        "bucket_plan": settings.plans_buckets,
        "forward_sync_buffers": replica.forward_sync_buffers,
        "skip_all_reduce_unused_params": settings.skip_unused,
        "mixed_precision": replica.mixed_precision,
        "reduction": arguments.describe_reduction(replica._reduction),
        "reduce_dtype": replica._reduce_dtype,
        "shard": replica._shard or replica._group.size,
        "copies": replica._copies,
        "placement": replica._placement.name,
        "units": _unit_names(replica) if replica._placement.shards_parameters else None,
        "lanes": replica._lane_count,
        "seed": replica._seed,
        "agreement": replica._agreement and replica._agreement.describe(),
    }
    mine = {
        "settings": {key: str(value) for key, value in told.items()},
        "params": [_describe(name, tensor) for name, tensor in _tensors_of(replica, with_buffers=True)],
    }
    described = gather_unless_equal(replica._group, mine, "the comparison of models")
    if described is not None:
        raise ModelMismatch(_first_difference(described))


def _unit_names(replica: Any) -> list[str]:
    units = {id(unit) for unit in find_units(replica.module, replica._units)}
    return [name for name, module in replica.module.named_modules() if id(module) in units]


def make_equal(replica: Any, init: str, *, with_buffers: bool) -> None:
    """Start from the values of rank 0, or check that all ranks have the same."""
    start = replica._from_meta  # tensors from meta get equal values later
    named = [
        pair for pair in _tensors_of(replica, with_buffers=with_buffers) if start is None or not start.has(pair[1])
    ]
    if init == "verify":
        verify_values(named, replica._group)
    else:
        broadcast_values([tensor for _, tensor in named], replica._group)


def _tensors_of(replica: Any, *, with_buffers: bool) -> list[tuple[str, torch.Tensor]]:
    named: list[tuple[str, torch.Tensor]] = list(replica.module.named_parameters())
    if with_buffers:
        named += replica.module.named_buffers()
    return [(name, tensor) for name, tensor in named if name not in replica.parameters_to_ignore]


def _describe(name: str, p: torch.Tensor) -> list[Any]:
    """The properties of a parameter or buffer that must be equal on all ranks."""
    if isinstance(p, torch.nn.parameter.UninitializedParameter):
        return [name, "uninitialized", str(p.dtype), "uninitialized", p.requires_grad, "not meta"]
    strides = list(p.stride()) if p.layout == torch.strided else []
    return [name, list(p.shape), str(p.dtype), strides, p.requires_grad, "meta" if p.is_meta else "not meta"]


def warn_of_kernels(mine: dict[str, str], group: Group) -> None:
    """Warn on rank 0 about settings that may give the ranks' kernels different results."""
    described = gather_unless_equal(group, mine, "the comparison of kernels")
    if described is None or group.rank != 0:
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


def _first_difference(described: Sequence[dict[str, Any]]) -> str:
    base = described[0]
    for rank, other in enumerate(described):
        for key in ("shard", "placement", *base["settings"]):  # other settings follow from the placement
            value = base["settings"].get(key)
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
            for what, a, b in zip(
                ("shape", "dtype", "strides", "requires_grad", "device"), here[1:], there[1:], strict=True
            ):
                if a != b:
                    return (
                        f"ranks wrapped different models: {here[0]} has {what} {a} on rank 0 and {b} on rank {rank}; "
                        f"build the model the same way, with the same configuration, on every rank"
                    )
    raise AssertionError("digests differ but descriptions do not")


def _only_in(ours: Sequence[Sequence[Any]], theirs: Sequence[Sequence[Any]]) -> str | None:
    names = {row[0] for row in theirs}
    return next((str(row[0]) for row in ours if row[0] not in names), None)


def broadcast_values(tensors: Sequence[torch.Tensor], group: Group, *, root: int = 0) -> None:
    """Overwrite `tensors` with those of rank `root`, in a few large messages."""
    for indices in _chunks(tensors):
        chunk = [tensors[i] for i in indices]
        flat = torch.cat([t.detach().reshape(-1) for t in chunk])
        group.wait(group.transport.broadcast(flat, root), "the broadcast of parameters and buffers")
        if group.rank != root:
            with torch.no_grad():
                for tensor, values in zip(chunk, flat.split([t.numel() for t in chunk]), strict=True):
                    tensor.detach().copy_(values.view(tensor.shape))


def verify_values(named: Sequence[tuple[str, torch.Tensor]], group: Group) -> None:
    """Compare the bits of all ranks and overwrite nothing; unequal replicas are an error on every rank."""
    drift = locate([Piece(name, tensor, 0, tensor.numel()) for name, tensor in named], group, step=0)
    if drift.tensors:
        raise ReplicasDiffer(
            f'replicas must start equal (init="verify"), but {drift.differences}. Either set the same seed before '
            f'building the model, or pass init="broadcast" to start from rank 0\'s values'
        )


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


# ---- in a new group


def resume_from_one_rank(monitor: ReplicaMonitor, step_state: StepState) -> None:
    """Ranks that were stopped at different points continue from one state that a rank really had: everything is
    taken from the lowest rank among those with the most completed updates that are not inside an update.

    Never tensor by tensor: a mixture of two steps is a state that no run was ever in.
    """
    group = monitor.group
    rows = gather_ints(
        group, [monitor.state.list_anew(), step_state.commits, int(step_state.whole)], "the comparison of states"
    )
    if len({signature for signature, _, _ in rows}) > 1:  # a rank that was replaced has no optimizer state yet
        monitor.state.compare_parameters_only()
    whole = [rank for rank, row in enumerate(rows) if row[2]]
    source = max(whole, key=lambda rank: (rows[rank][1], -rank)) if whole else 0
    pieces = monitor.state.whole()
    digests = gather_ints(group, [state_digest([piece.flat() for piece in pieces])], "the comparison of states")
    if any(digest != digests[0] for digest in digests):
        for piece in pieces:
            spread(piece, source, group)
        if group.rank == 0:
            logger.warning(
                "ranks were stopped at different points of a step; all continue from the state of rank %d, %s",
                source,
                f"after {rows[source][1]} updates" if whole else "though no rank was between two updates",
            )
    step_state.took(rows[source][1])
