"""DeepSpeed ZeRO."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.bench.contenders import Contender
from paceline.bench.contenders.trainee import (
    BuildContext,
    Trainee,
    all_reduce_bytes,
    detached,
    fully_sharded_bytes,
)
from paceline.bench.gpt import build_model, build_optimizer


def build(context: BuildContext) -> Trainee:
    import deepspeed

    spec, stage = context.spec, int(context.name[-1])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.micro_batch,
        "gradient_accumulation_steps": spec.accumulate,
        "zero_optimization": {"stage": stage, **context.arguments},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if spec.shape.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    deepspeed.init_distributed("nccl" if context.device.type == "cuda" else "gloo")
    model = build_model(spec, context.device)
    # Before stage 3 takes the parameters apart.
    whole, gathers = all_reduce_bytes(model, context.size), fully_sharded_bytes(model, context)
    engine: Any
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(spec, model),
        model_parameters=model.parameters(),
        config=config,
    )

    # Gradients are reduced to their owners, from stage 2 on after every microbatch. Updated parameters are gathered
    # once, by stage 3 in every forward and backward.
    reductions = spec.accumulate if stage > 1 else 1
    sent = gathers if stage == 3 else (reductions + 1) * whole // 2

    @contextmanager
    def no_sync() -> Iterator[None]:
        yield
        engine.step()  # it counts microbatches by these calls, and updates at the last one

    return Trainee(
        engine,
        engine.step,
        list if stage == 3 else detached(model.parameters),
        sent,
        backward=engine.backward,
        no_sync=no_sync,
        divides_loss=True,
    )


deepspeed1 = Contender("DeepSpeed ZeRO stage 1", build, needs=("deepspeed",))
deepspeed2 = Contender("DeepSpeed ZeRO stage 2", build, needs=("deepspeed",))
deepspeed3 = Contender("DeepSpeed ZeRO stage 3", build, needs=("deepspeed",))
