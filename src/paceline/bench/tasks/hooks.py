"""Forward and backward over very many very small parameters."""

import gc
import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.bench.contenders import ContenderName
from paceline.bench.spec import HooksSpec
from paceline.bench.tasks import LineUp
from paceline.bench.tasks.group import Meeting, leave


class Many(nn.Module):
    """A model that does hardly anything but have parameters."""

    def __init__(self, count: int, numel: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(numel)) for _ in range(count))

    def forward(self) -> torch.Tensor:
        return torch.cat(list(self.parts)).sum()


class HooksTask:
    """Times models of the sizes that the conductor asks for. The label is `contender@world`."""

    def __init__(self, spec: HooksSpec, label: str, rank: int, size: int) -> None:
        torch.set_num_threads(1)
        self._spec, self._name = spec, ContenderName.parse(label.rpartition("@")[0]).name
        self._meeting = Meeting(rank, size)
        self._models: dict[int, nn.Module] = {}

    def meet(self) -> int:
        return self._meeting.port()

    def build(self, ports: list[int]) -> dict[str, Any]:
        self._meeting.form(ports[0], torch.device("cpu"))
        return {}

    def run(self, message: dict[str, Any], line_up: LineUp) -> dict[str, Any]:
        count = message["parameters"]
        if count not in self._models:
            self._models[count] = self._wrap(Many(count, self._spec.numel))
            for _ in range(3):
                self._step(self._models[count], line_up)
        model = self._models[count]
        gc.collect()
        gc.disable()
        try:
            return {"seconds": [self._step(model, line_up) for _ in range(self._spec.burst)]}
        finally:
            gc.enable()

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self._name == "paceline":
            import paceline  # here: it may be another checkout's

            return paceline.DistributedDataParallel(model)
        if self._name == "torch":
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model

    def _step(self, model: nn.Module, line_up: LineUp) -> float:
        """A step without an optimizer. zero_grad is part of it: there the bare model frees its gradients, which a
        reducer that has copied them frees in backward."""
        line_up()
        begin = time.perf_counter()
        model.zero_grad()
        model().backward()
        return time.perf_counter() - begin

    def finish(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._models.clear()
        leave()
