"""The timed training loop of torch contenders."""

import gc
import time
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch

from paceline.bench.contenders import ContenderName, find_contender
from paceline.bench.contenders.trainee import Place, Trainee
from paceline.bench.model import Batch, build_model, build_optimizer, global_batches, rank_batches
from paceline.bench.spec import StepSpec
from paceline.bench.tasks import LineUp
from paceline.bench.tasks.group import Meeting, choose_device, leave
from paceline.memory_plan.measured import Peak

PHASES = ("forward", "backward", "optimizer")


class StepTask:
    """Trains one rank of one contender, burst by burst."""

    def __init__(self, spec: StepSpec, label: str, rank: int, size: int) -> None:
        self._spec, self._rank, self._size = spec, rank, size
        self._name = ContenderName.parse(label)
        self._contender = find_contender(label)
        torch.set_num_threads(spec.threads * (spec.ranks if self._contender.one_process else 1))
        self._device = choose_device(spec.device, rank, size)
        self._module: Any = import_module(f"paceline.bench.contenders.{self._contender.module}")
        self._meeting = Meeting(rank, size)
        self._trainee: Trainee
        self._memory: Peak
        self._start_peak: int | None = None

    def meet(self) -> int:
        return 0 if self._contender.launcher == "mpiexec" else self._meeting.port()

    def build(self, ports: list[int]) -> dict[str, Any]:
        if not self._contender.one_process and self._contender.launcher != "mpiexec":
            self._meeting.form(ports[0], self._device)
        _touch_libraries(self._device)
        self._memory = Peak(self._device)
        arguments = dict(self._name.arguments)
        own = not self._name.checkout
        place = Place(self._spec, self._name.name, arguments, self._rank, self._size, self._device, own)
        self._trainee = self._module.build(place)
        gpu = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else None
        return {"gpu": gpu, "sent_bytes": self._trainee.sent_bytes, "notes": self._trainee.notes}

    def run(self, message: dict[str, Any], line_up: LineUp) -> dict[str, Any]:
        if message["what"] == "communicate":
            return {"seconds": self._communicate(line_up)}
        gc.collect()
        timed = message["timed"]
        if timed:
            self._end_of_start()
        numbers = range(message["first"], message["until"])
        together = timed if self._spec.timing == "burst" else 1
        gc.disable()
        try:
            steps = [step for turn in _turns(numbers, together) for step in self._steps(turn, line_up)]
        finally:
            gc.enable()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # for the others; the untimed steps of the next burst ask for it again
        return {"steps": steps, "observed": self._trainee.observe()}

    def _end_of_start(self) -> None:
        """From here on memory is that of training alone, without what building and first steps needed for a moment."""
        if self._start_peak is None:
            self._start_peak = self._memory.nbytes()
            self._memory.restart()

    def _steps(self, numbers: Sequence[int], line_up: LineUp) -> list[dict[str, float]]:
        """Run steps that are timed together."""
        batches = [self._batches(number) for number in numbers]
        self._synchronize()
        line_up()
        begin = time.perf_counter()
        trained = [self._train(batch, number) for batch, number in zip(batches, numbers, strict=True)]
        self._synchronize()
        seconds = (time.perf_counter() - begin) / len(numbers)
        found = []
        for marks, loss in trained:
            phases = {name: sum(self._between(*pair) for pair in marks[name]) for name in PHASES}
            found.append({"seconds": seconds, "loss": float(loss), **phases})
        return found

    def _train(self, batches: list[Batch], number: int) -> tuple[dict[str, list[Any]], torch.Tensor]:
        trainee, micros = self._trainee, len(batches)
        marks: dict[str, list[Any]] = {name: [] for name in PHASES}
        total = torch.zeros((), device=self._device)
        for index, (x, y) in enumerate(trainee.turns(batches, number)):
            with trainee.quiet() if index < micros - 1 else nullcontext():
                began = self._mark()
                loss = trainee.forward(x, y)
                if micros > 1:
                    total += loss.detach() / micros
                    loss = loss if trainee.divides else loss / micros
                else:
                    total = loss.detach()
                between = self._mark()
                trainee.backward(loss)
                ended = self._mark()
            marks["forward"].append((began, between))
            marks["backward"].append((between, ended))
        trainee.update()
        marks["optimizer"].append((ended, self._mark()))
        return marks, total

    def _batches(self, number: int) -> list[Batch]:
        if self._contender.one_process:
            return global_batches(self._spec, self._device, number)
        return rank_batches(self._spec, self._device, self._rank, number)

    def _mark(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(end - begin) if self._device.type == "cpu" else float(begin.elapsed_time(end)) / 1000

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _communicate(self, line_up: LineUp) -> float | None:
        if self._trainee.communicate is None:
            return None
        self._synchronize()
        line_up()
        begin = time.perf_counter()
        self._trainee.communicate()
        self._synchronize()
        return time.perf_counter() - begin

    def finish(self) -> dict[str, Any]:
        peak = self._memory.nbytes()
        params = self._trainee.params()
        digest = sum(float(param.double().abs().sum()) for param in params) if params else None
        return {"peak_bytes": peak, "start_peak_bytes": self._start_peak, "digest": digest}

    def close(self) -> None:
        self._trainee.close()
        leave()


def _turns(numbers: Sequence[int], together: int) -> list[Sequence[int]]:
    """The last `together` steps at once, those before one by one."""
    split = len(numbers) - together if together > 1 else len(numbers)
    turns = [numbers[index : index + 1] for index in range(split)]
    return [*turns, numbers[split:]] if together > 1 else turns


def _touch_libraries(device: torch.device) -> None:
    """Train a tiny model for a step: what torch loads on first use is not the contender's memory."""
    spec = StepSpec(model="gpt-tiny")
    model = build_model(spec, device)
    optimizer = build_optimizer(spec, model)
    model(*rank_batches(spec, device, 0, 0)[0]).backward()
    optimizer.step()
