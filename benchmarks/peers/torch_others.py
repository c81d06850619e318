"""What else torch offers: nn.DataParallel, and the composable replicate."""

from typing import Any

import torch
from torch import nn

from paceline.bench.contenders import Contender
from paceline.bench.contenders.torch_peers import no_gradient_sync
from paceline.bench.contenders.trainee import BuildContext, Trainee, all_reduce_bytes, detached, update_with
from paceline.bench.gpt import build_model, build_optimizer


def build_dataparallel(context: BuildContext) -> Trainee:
    model = build_model(context.spec, context.device)
    wrapped = nn.DataParallel(model, **context.arguments)
    update = update_with(context.spec, build_optimizer(context.spec, model))

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = wrapped(x, y)
        return loss.mean()  # one loss per device

    return Trainee(forward, update, detached(model.parameters), 0)


def replicate(context: BuildContext) -> Trainee:
    """torch replicate"""
    from torch.distributed._composable import replicate as wrap

    model = build_model(context.spec, context.device)
    arguments: dict[str, Any] = {"gradient_as_bucket_view": True} | context.arguments
    wrapped: Any = wrap(model, **arguments)
    update = update_with(context.spec, build_optimizer(context.spec, model))
    sent = all_reduce_bytes(model, context.size)
    return Trainee(model, update, detached(model.parameters), sent, no_sync=lambda: no_gradient_sync(wrapped))


dataparallel = Contender(
    "torch.nn.DataParallel, one process, the same global batch; on a CPU it is the bare module",
    build_dataparallel,
    one_process=True,
)
