"""Steps of one rank that does all that it would do among several."""

import gc
import time
from importlib import import_module
from typing import Any

import torch

from paceline.bench.contenders import ContenderName, find_contender
from paceline.bench.contenders.trainee import Place, Trainee
from paceline.bench.model import Batch, rank_batches
from paceline.bench.spec import MachinerySpec
from paceline.bench.tasks import LineUp
from paceline.bench.tasks.group import Meeting, choose_device, leave


class MachineryTask:
    """Trains one contender on the same batch again and again, burst by burst."""

    def __init__(self, spec: MachinerySpec, label: str) -> None:
        self._spec, self._name = spec, ContenderName.parse(label)
        torch.set_num_threads(spec.threads)
        self._device = choose_device(spec.device, 0, 1)
        self._module: Any = import_module(f"paceline.bench.contenders.{find_contender(label).module}")
        self._meeting = Meeting(0, 1)
        self._trainee: Trainee
        self._batch: Batch

    def meet(self) -> int:
        return self._meeting.port()

    def build(self, ports: list[int]) -> dict[str, Any]:
        self._meeting.form(ports[0], self._device, self._spec.backend)
        step, name = self._spec.step(), self._name
        place = Place(
            step, name.name, dict(name.arguments), 0, 1, self._device, not name.checkout, counts_as_several=True
        )
        self._trainee = self._module.build(place)
        (self._batch,) = rank_batches(step, self._device, 0, 0)
        gpu = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else None
        return {"gpu": gpu, "tensors": len(self._trainee.params())}

    def run(self, message: dict[str, Any], line_up: LineUp) -> dict[str, Any]:
        # Memory stays with the contender between its turns: to ask for it again would be part of what is timed.
        gc.collect()
        gc.disable()
        try:
            if message["settle"]:
                self._train(message["settle"])
            begin = time.perf_counter()
            loss = self._train(message["steps"])
            seconds = (time.perf_counter() - begin) / message["steps"]
        finally:
            gc.enable()
        return {"seconds": seconds, "loss": float(loss)}

    def _train(self, steps: int) -> torch.Tensor:
        """So many steps, and the loss of the last. The host waits for the device at their end alone."""
        trainee, (x, y) = self._trainee, self._batch
        for _ in range(steps):
            loss = trainee.forward(x, y)
            trainee.backward(loss)
            trainee.update()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return loss.detach()

    def finish(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._trainee.close()
        leave()
