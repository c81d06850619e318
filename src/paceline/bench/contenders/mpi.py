"""By hand over MPI: one flat all-reduce after backward. torch's wheels have no MPI backend."""

import torch
from mpi4py import MPI

from paceline.bench.contenders.trainee import Place, Trainee, all_reduce_bytes, details, update_with
from paceline.bench.model import build_model, build_optimizer


def build(place: Place) -> Trainee:
    world = MPI.COMM_WORLD
    model = build_model(place.spec, place.device)
    params = list(model.parameters())
    update = update_with(place.spec, build_optimizer(place.spec, model))

    def reduce_and_update() -> None:
        grads = [param.grad for param in params if param.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        world.Allreduce(MPI.IN_PLACE, flat.numpy(), MPI.SUM)
        flat /= world.size
        parts = flat.split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])
        update()

    def communicate() -> None:
        world.Allreduce(MPI.IN_PLACE, torch.zeros(sum(p.numel() for p in params)).numpy(), MPI.SUM)

    return Trainee(
        model,
        reduce_and_update,
        details(model.parameters),
        all_reduce_bytes(model, place.size),
        communicate=communicate,
        notes=[MPI.Get_library_version().split("\n")[0].replace("\t", " ")],
    )
