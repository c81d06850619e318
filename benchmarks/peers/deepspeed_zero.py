"""DeepSpeed ZeRO."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.bench.contenders import Contender
from paceline.bench.contenders.trainee import BuildContext, Trainee, all_reduce_bytes, detached
from paceline.bench.gpt import build_model, build_optimizer


def build(context: BuildContext) -> Trainee:
    import deepspeed

    spec = context.spec
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.micro_batch,
        "gradient_accumulation_steps": spec.accumulate,
        "zero_optimization": {"stage": 1 if context.name == "deepspeed1" else 2, **context.arguments},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if spec.shape.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    deepspeed.init_distributed("nccl" if context.device.type == "cuda" else "gloo")
    model = build_model(spec, context.device)
    engine: Any
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(spec, model),
        model_parameters=model.parameters(),
        config=config,
    )

    # Gradients are reduced to their owners, by stage 2 after every microbatch; updated parameters are gathered once.
    reductions = spec.accumulate if context.name == "deepspeed2" else 1

    @contextmanager
    def no_sync() -> Iterator[None]:
        yield
        engine.step()  # it counts microbatches by these calls, and updates at the last one

    return Trainee(
        engine,
        engine.step,
        detached(model.parameters),
        (reductions + 1) * all_reduce_bytes(model, context.size) // 2,
        backward=engine.backward,
        no_sync=no_sync,
        divides_loss=True,
    )


deepspeed1 = Contender("DeepSpeed ZeRO stage 1", build, needs=("deepspeed",))
deepspeed2 = Contender("DeepSpeed ZeRO stage 2", build, needs=("deepspeed",))
