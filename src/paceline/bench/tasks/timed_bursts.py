"""Steps of one rank that does all the work of a rank among several, timed one burst at a time."""

import time
from typing import Any

import torch

from paceline.bench.contenders import ContenderName, find_contender
from paceline.bench.contenders.trainee import BuildContext, Trainee
from paceline.bench.gpt import Batch, rank_batches
from paceline.bench.machinery import MachinerySpec
from paceline.bench.tasks import Barrier
from paceline.bench.tasks.process_group import GroupTask, choose_device, gpu_name, no_garbage_collection, synchronize


class MachineryTask(GroupTask):
    """Trains one contender on the same batch over and over, burst by burst."""

    def __init__(self, spec: MachinerySpec, contender: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._spec, self._name = spec, ContenderName.parse(contender)
        torch.set_num_threads(spec.threads)
        self._device = choose_device(spec.device, rank, size)
        self._build = find_contender(contender).builder()
        self._trainee: Trainee
        self._batch: Batch

    def build(self, ports: list[int]) -> dict[str, Any]:
        self._form_group(ports[0], self._device, self._spec.backend)
        step, name = self._spec.step(), self._name
        context = BuildContext(
            step, name.name, dict(name.arguments), 0, 1, self._device, not name.checkout, counts_as_several=True
        )
        self._trainee = self._build(context)
        (self._batch,) = rank_batches(step, self._device, 0, 0)
        return {"gpu": gpu_name(self._device), "tensors": len(self._trainee.params())}

    def run(self, message: dict[str, Any], barrier: Barrier) -> dict[str, Any]:
        # The contender keeps its memory between turns: allocating it again would be timed.
        with no_garbage_collection():
            if message["settle"]:
                self._train(message["settle"])
            begin = time.perf_counter()
            loss = self._train(message["steps"])
            seconds = (time.perf_counter() - begin) / message["steps"]
        return {"seconds": [seconds], "loss": float(loss)}

    def _train(self, steps: int) -> torch.Tensor:
        """Train `steps` steps and return the loss of the last. The host waits for the device only at their end."""
        trainee, (x, y) = self._trainee, self._batch
        for _ in range(steps):
            loss = trainee.forward(x, y)
            trainee.backward(loss)
            trainee.update()
        synchronize(self._device)
        return loss.detach()

    def close(self) -> None:
        self._trainee.close()
        super().close()
