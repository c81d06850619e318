"""The floor, and what torch itself offers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from paceline.bench.contenders.trainee import (
    BuildContext,
    Trainee,
    all_reduce_alone,
    all_reduce_bytes,
    detached,
    fully_sharded_bytes,
    update_with,
)
from paceline.bench.gpt import BenchGPT, build_model, build_optimizer

MIB = 1024 * 1024


def unwrapped(context: BuildContext) -> Trainee:
    model = build_model(context.spec, context.device)
    return Trainee(
        model, update_with(context.spec, build_optimizer(context.spec, model)), detached(model.parameters), 0
    )


def ddp(context: BuildContext) -> Trainee:
    model = build_model(context.spec, context.device)
    arguments: dict[str, Any] = {"gradient_as_bucket_view": True} | context.arguments
    if context.device.type == "cuda":
        arguments["device_ids"] = [context.device.index]
    wrapped = DistributedDataParallel(model, **arguments)
    update = update_with(context.spec, build_optimizer(context.spec, wrapped))
    sent = all_reduce_bytes(model, context.size)
    return Trainee(
        wrapped,
        update,
        detached(model.parameters),
        sent,
        no_sync=wrapped.no_sync,
        communicate=all_reduce_alone(_pieces(model), context) if context.size > 1 else None,
    )


def zero_redundancy(context: BuildContext) -> Trainee:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    made = ddp(context)
    wrapped = cast(DistributedDataParallel, made.forward)
    options: dict[str, Any] = {"lr": context.spec.learning_rate, "fused": True}
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), AdamW, **options)
    return replace(made, update=update_with(context.spec, optimizer), communicate=None)


def _pieces(model: BenchGPT) -> list[int]:
    """Elements of buckets of torch's size that hold all gradients of the model."""
    cap = 25 * MIB // next(model.parameters()).element_size()
    total = sum(param.numel() for param in model.parameters())
    return [min(cap, total - begin) for begin in range(0, total, cap)]


def fsdp2(context: BuildContext) -> Trainee:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build_model(context.spec, context.device)
    sent = fully_sharded_bytes(model, context)
    mesh = init_device_mesh(context.device.type, (context.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **context.arguments)
    sharded: Any = fully_shard(model, mesh=mesh, **context.arguments)
    update = update_with(context.spec, build_optimizer(context.spec, model))
    return Trainee(model, update, list, sent, no_sync=lambda: no_gradient_sync(sharded))


@contextmanager
def no_gradient_sync(module: Any) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)
