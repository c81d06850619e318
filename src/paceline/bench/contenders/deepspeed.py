"""DeepSpeed ZeRO."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed

from paceline.bench.contenders.trainee import Place, Trainee, all_reduce_bytes, details
from paceline.bench.model import build_model, build_optimizer


def build(place: Place) -> Trainee:
    spec = place.spec
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.micro_batch,
        "gradient_accumulation_steps": spec.accumulate,
        "zero_optimization": {"stage": 1 if place.name == "deepspeed1" else 2, **place.arguments},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if spec.shape.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    deepspeed.init_distributed("nccl" if place.device.type == "cuda" else "gloo")
    model = build_model(spec, place.device)
    engine: Any
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(spec, model),
        model_parameters=model.parameters(),
        config=config,
    )

    # Gradients are reduced to their owners, by stage 2 after every micro; updated parameters are gathered once.
    reductions = spec.accumulate if place.name == "deepspeed2" else 1

    @contextmanager
    def quiet() -> Iterator[None]:
        yield
        engine.step()  # it counts micros by these calls, and updates at the last one

    return Trainee(
        engine,
        engine.step,
        details(model.parameters),
        (reductions + 1) * all_reduce_bytes(model, place.size) // 2,
        backward=engine.backward,
        quiet=quiet,
        divides=True,
    )
