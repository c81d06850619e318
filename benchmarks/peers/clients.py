"""Training loops of others that use torch DDP inside: Accelerate and Lightning Fabric."""

from typing import Any

from paceline.bench.contenders import Contender
from paceline.bench.contenders.trainee import BuildContext, Trainee, all_reduce_bytes, detached, update_with
from paceline.bench.gpt import build_model, build_optimizer


def build_accelerate(context: BuildContext) -> Trainee:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    arguments: dict[str, Any] = {"gradient_as_bucket_view": True} | context.arguments
    accelerator: Any = Accelerator(
        cpu=context.device.type == "cpu", kwargs_handlers=[DistributedDataParallelKwargs(**arguments)]
    )
    net = build_model(context.spec, context.device)
    model, optimizer = accelerator.prepare(net, build_optimizer(context.spec, net))
    return Trainee(
        model,
        update_with(context.spec, optimizer),
        detached(net.parameters),
        all_reduce_bytes(net, context.size),
        backward=accelerator.backward,
        no_sync=lambda: accelerator.no_sync(model),
        notes=[f"wraps the model in {type(model).__name__}"],
    )


def build_fabric(context: BuildContext) -> Trainee:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.ddp import DDPStrategy

    arguments: dict[str, Any] = {"gradient_as_bucket_view": True} | context.arguments
    fabric: Any = Fabric(
        accelerator=context.device.type, devices=context.size, strategy=DDPStrategy(**arguments), precision="32-true"
    )
    # The ranks are there already, and so is their group.
    fabric.launch()
    net = build_model(context.spec, context.device)
    model, optimizer = fabric.setup(net, build_optimizer(context.spec, net))
    return Trainee(
        model,
        update_with(context.spec, optimizer),
        detached(net.parameters),
        all_reduce_bytes(net, context.size),
        backward=fabric.backward,
        no_sync=lambda: fabric.no_backward_sync(model),
        notes=[f"wraps the model in {type(model._forward_module).__name__}"],
    )


accelerate = Contender("Hugging Face Accelerate", build_accelerate, needs=("accelerate",))
fabric = Contender("Lightning Fabric, strategy=ddp", build_fabric, needs=("lightning_fabric",))
