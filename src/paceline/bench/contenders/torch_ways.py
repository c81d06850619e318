"""The floor, and what torch itself offers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.bench.contenders.trainee import (
    Place,
    Trainee,
    all_reduce_alone,
    all_reduce_bytes,
    details,
    gradient_bytes,
    update_with,
)
from paceline.bench.model import GPT, build_model, build_optimizer

MIB = 1024 * 1024


def build(place: Place) -> Trainee:
    return {
        "floor": _bare,
        "bare": _bare,
        "single": _bare,
        "dataparallel": _data_parallel,
        "torch": _ddp,
        "fsdp2": _fsdp2,
        "replicate": _replicate,
    }[place.name](place)


def _bare(place: Place) -> Trainee:
    model = build_model(place.spec, place.device)
    return Trainee(model, update_with(place.spec, build_optimizer(place.spec, model)), details(model.parameters), 0)


def _data_parallel(place: Place) -> Trainee:
    model = build_model(place.spec, place.device)
    wrapped = nn.DataParallel(model, **place.arguments)
    update = update_with(place.spec, build_optimizer(place.spec, model))

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = wrapped(x, y)
        return loss.mean()  # one loss per device

    return Trainee(forward, update, details(model.parameters), 0)


def _ddp(place: Place) -> Trainee:
    model = build_model(place.spec, place.device)
    arguments: dict[str, Any] = {"gradient_as_bucket_view": True} | place.arguments
    if place.device.type == "cuda":
        arguments["device_ids"] = [place.device.index]
    wrapped = DistributedDataParallel(model, **arguments)
    update = update_with(place.spec, build_optimizer(place.spec, wrapped))
    sent = all_reduce_bytes(model, place.size)
    return Trainee(
        wrapped,
        update,
        details(model.parameters),
        sent,
        quiet=wrapped.no_sync,
        communicate=all_reduce_alone(_pieces(model), place) if place.size > 1 else None,
    )


def _pieces(model: GPT) -> list[int]:
    """Elements of buckets of torch's size that hold all gradients of the model."""
    cap = 25 * MIB // next(model.parameters()).element_size()
    total = sum(param.numel() for param in model.parameters())
    return [min(cap, total - begin) for begin in range(0, total, cap)]


def _fsdp2(place: Place) -> Trainee:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build_model(place.spec, place.device)
    nbytes = gradient_bytes(model)
    mesh = init_device_mesh(place.device.type, (place.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **place.arguments)
    sharded: Any = fully_shard(model, mesh=mesh, **place.arguments)
    update = update_with(place.spec, build_optimizer(place.spec, model))
    # Gathered in every forward and again in every backward; gradients are reduced and scattered once.
    sent = (2 * place.spec.accumulate + 1) * (place.size - 1) * nbytes // place.size
    return Trainee(model, update, list, sent, quiet=lambda: _no_gradient_sync(sharded))


@contextmanager
def _no_gradient_sync(module: Any) -> Iterator[None]:
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def _replicate(place: Place) -> Trainee:
    from torch.distributed._composable import replicate

    model: GPT = build_model(place.spec, place.device)
    arguments: dict[str, Any] = {"gradient_as_bucket_view": True} | place.arguments
    wrapped: Any = replicate(model, **arguments)
    update = update_with(place.spec, build_optimizer(place.spec, model))
    sent = all_reduce_bytes(model, place.size)
    return Trainee(model, update, details(model.parameters), sent, quiet=lambda: _no_gradient_sync(wrapped))
