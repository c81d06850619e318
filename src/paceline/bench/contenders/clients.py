"""Training loops of others that use torch DDP inside: Accelerate and Lightning Fabric."""

from typing import Any

from paceline.bench.contenders.trainee import Place, Trainee, all_reduce_bytes, details, update_with
from paceline.bench.model import build_model, build_optimizer


def build(place: Place) -> Trainee:
    return {"accelerate": _accelerate, "fabric": _fabric}[place.name](place)


def _accelerate(place: Place) -> Trainee:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    arguments: dict[str, Any] = {"gradient_as_bucket_view": True} | place.arguments
    accelerator: Any = Accelerator(
        cpu=place.device.type == "cpu", kwargs_handlers=[DistributedDataParallelKwargs(**arguments)]
    )
    net = build_model(place.spec, place.device)
    model, optimizer = accelerator.prepare(net, build_optimizer(place.spec, net))
    return Trainee(
        model,
        update_with(place.spec, optimizer),
        details(net.parameters),
        all_reduce_bytes(net, place.size),
        backward=accelerator.backward,
        quiet=lambda: accelerator.no_sync(model),
        notes=[f"wraps the model in {type(model).__name__}"],
    )


def _fabric(place: Place) -> Trainee:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.ddp import DDPStrategy

    arguments: dict[str, Any] = {"gradient_as_bucket_view": True} | place.arguments
    fabric: Any = Fabric(
        accelerator=place.device.type, devices=place.size, strategy=DDPStrategy(**arguments), precision="32-true"
    )
    # The ranks are there already, and so is their group.
    fabric.launch()
    net = build_model(place.spec, place.device)
    model, optimizer = fabric.setup(net, build_optimizer(place.spec, net))
    return Trainee(
        model,
        update_with(place.spec, optimizer),
        details(net.parameters),
        all_reduce_bytes(net, place.size),
        backward=fabric.backward,
        quiet=lambda: fabric.no_backward_sync(model),
        notes=[f"wraps the model in {type(model._forward_module).__name__}"],
    )
