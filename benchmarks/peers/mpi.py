"""By hand over MPI: one flat all-reduce after backward, and the all-reduce alone. torch's wheels have no MPI backend.

paceline bench step --contenders floor,torch,paceline,benchmarks/peers/mpi.py:mpi4py
paceline bench allreduce --contenders paceline,gloo,benchmarks/peers/mpi.py:mpi
"""

from typing import Any

import torch

from paceline.bench.contenders import Contender
from paceline.bench.contenders.trainee import BuildContext, Trainee, all_reduce_bytes, detached, update_with
from paceline.bench.gpt import build_model, build_optimizer
from paceline.bench.tasks.timed_allreduce import AllReduceTask, Prepared


def build(context: BuildContext) -> Trainee:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    model = build_model(context.spec, context.device)
    params = list(model.parameters())
    update = update_with(context.spec, build_optimizer(context.spec, model))

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
        detached(model.parameters),
        all_reduce_bytes(model, context.size),
        communicate=communicate,
        notes=[MPI.Get_library_version().split("\n")[0].replace("\t", " ")],
    )


class MPIAllReduceTask(AllReduceTask):
    """All-reduces of the sizes that the conductor asks for, by MPI."""

    def bind(self) -> int:
        return 0

    def build(self, ports: list[int]) -> dict[str, Any]:
        from mpi4py import MPI

        return {"gpu": None, "transport": MPI.Get_library_version().split("\n")[0]}

    def prepare(self, numel: int) -> Prepared:
        from mpi4py import MPI

        buffer = torch.zeros(numel)
        array = buffer.numpy()
        return buffer, lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array, MPI.SUM)


mpi4py = Contender("one flat MPI all-reduce after backward", build, needs=("mpi4py",), mpiexec=True, devices=("cpu",))
mpi = Contender("MPI_Allreduce", task=MPIAllReduceTask, needs=("mpi4py",), mpiexec=True)
