"""paceline's own class, through the public API.

`paceline` is imported where it is used: by then it may be another checkout's (see `bench.checkout`).
"""

from contextlib import nullcontext
from dataclasses import replace
from inspect import signature
from typing import Any

import torch.distributed as dist

from paceline.bench.contenders.trainee import (
    BuildContext,
    Trainee,
    all_reduce_alone,
    all_reduce_bytes,
    detached,
    fully_sharded_bytes,
    update_with,
)
from paceline.bench.gpt import build_model, build_optimizer
from paceline.errors import UsageError
from paceline.observe.timeline import read_overlap

PLACEMENTS = ("zero1", "zero2", "zero3")
CHECKS: dict[str, dict[str, Any]] = {
    "agreement": {"state_every": 64, "not_finite": "skip"},
    "no-agreement": {"state_every": 0, "not_finite": "keep"},
    "lanes-audited": {"audit_every": 1},
    "lanes-checksums-torch": {"checksums": True},
}


def build(context: BuildContext) -> Trainee:
    import paceline

    model = build_model(context.spec, context.device)
    wrapped = paceline.DistributedDataParallel(model, **wrapper_arguments(context))

    def observe() -> dict[str, Any]:
        found = read_overlap(wrapped.trace.stamps())
        plan = getattr(wrapped, "bucket_plan", None)
        predicted = getattr(plan, "predicted_exposed_s", None)
        sizes = [bucket.nbytes for bucket in wrapped.layout.buckets]
        return found | {"bucket_bytes": sizes, "predicted_exposed_s": predicted}

    def communicate() -> None:
        all_reduce_alone([bucket.numel for bucket in wrapped.layout.buckets], context)()

    sent, params = all_reduce_bytes(model, context.size), detached(model.parameters)
    optimizer = build_optimizer(context.spec, wrapped)
    if context.name in PLACEMENTS:
        optimizer = wrapped.optimizer(optimizer)
    if context.name == "zero3":
        sent, params = fully_sharded_bytes(model, context), list
    made = Trainee(wrapped, update_with(context.spec, optimizer), params, sent, no_sync=wrapped.no_sync)
    if context.this_checkout:
        # On a GPU the host does not learn when a bucket is complete, so the trace cannot tell what was hidden.
        from_trace = context.device.type == "cpu" or context.size == 1
        made = replace(made, observe=observe, communicate=None if from_trace else communicate)
    if context.name.startswith("lanes"):  # a replica in lanes takes the mean over all of them itself
        return replace(made, microbatches=wrapped.lanes, no_sync=nullcontext, divides_loss=True)
    return made


def wrapper_arguments(context: BuildContext) -> dict[str, Any]:
    """The arguments of the model's wrapper: what the contender's name stands for, and those written after it."""
    from paceline import Agreement

    found: dict[str, Any] = {}
    if context.counts_as_several:
        found["transport"] = _counting_as_several()
    if context.name.endswith("-torch"):
        found["transport"] = "torch"
    if context.name in PLACEMENTS:
        found["placement"] = context.name
    if context.name.startswith("lanes"):
        # One per microbatch of a step, so that the work equals that of the plain mode.
        found |= {"lanes": context.spec.ranks * context.spec.accumulate, "seed": context.spec.seed}
    if context.device.type == "cuda":
        found["device_ids"] = [context.device.index]
    if context.name in CHECKS:
        return found | {"agreement": Agreement(**CHECKS[context.name] | context.arguments)}
    return found | context.arguments


def _counting_as_several() -> Any:
    """A transport over the default group of one rank, whose replica behaves as it would among several ranks."""
    from paceline.collectives import TorchDistTransport

    make: Any = TorchDistTransport
    if "counts_as_several" not in signature(make).parameters:
        raise UsageError(
            f"{make.__module__}: expected TorchDistTransport to take counts_as_several=True; this checkout is too old "
            "for `bench machinery`, where one rank takes the path of several"
        )
    return make(dist.group.WORLD, counts_as_several=True)
