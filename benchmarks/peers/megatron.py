"""Megatron-core's DistributedDataParallel. Its distributed optimizer needs a CUDA device."""

from typing import Any

import torch

from paceline.bench.contenders import Contender
from paceline.bench.contenders.trainee import BuildContext, Trainee, all_reduce_bytes, detached
from paceline.bench.gpt import build_model, build_optimizer


def build(context: BuildContext) -> Trainee:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    spec = context.spec
    if context.device.type == "cpu":
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]  # where it makes its buffers
    parallel_state.initialize_model_parallel()
    model = build_model(spec, context.device)
    shape = spec.shape
    sizes = TransformerConfig(num_layers=shape.layers, hidden_size=shape.width, num_attention_heads=shape.heads)
    settings = {"overlap_grad_reduce": True, **context.arguments}
    wrapped: Any = DistributedDataParallel(sizes, DistributedDataParallelConfig(**settings), model)
    wrapped.broadcast_params()
    wrapped.zero_grad_buffer()
    optimizer = build_optimizer(spec, model)

    def update() -> None:
        wrapped.finish_grad_sync()
        for param in model.parameters():
            param.grad = param.main_grad
        optimizer.step()
        for param in model.parameters():
            param.grad = None
        wrapped.zero_grad_buffer()

    sent = all_reduce_bytes(model, context.size)
    return Trainee(wrapped, update, detached(model.parameters), sent, no_sync=wrapped.no_sync)


megatron = Contender("Megatron-core's DistributedDataParallel", build, needs=("megatron.core",))
