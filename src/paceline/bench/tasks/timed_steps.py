"""The timed training loop of torch contenders."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch

from paceline.bench.contenders import ContenderName, find_contender
from paceline.bench.contenders.trainee import BuildContext, Trainee
from paceline.bench.gpt import Batch, build_model, build_optimizer, global_batches, rank_batches
from paceline.bench.spec import StepSpec
from paceline.bench.tasks import Barrier
from paceline.bench.tasks.process_group import GroupTask, choose_device, gpu_name, no_garbage_collection, synchronize
from paceline.memory_plan.measured import Peak

PHASES = ("forward", "backward", "optimizer")


class StepTask(GroupTask):
    """Trains one rank of one contender, burst by burst."""

    def __init__(self, spec: StepSpec, contender: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._spec, self._name, self._contender = spec, ContenderName.parse(contender), find_contender(contender)
        torch.set_num_threads(spec.threads * (spec.ranks if self._contender.one_process else 1))
        self._device = choose_device(spec.device, rank, size)
        self._build = self._contender.builder()
        for module in self._contender.needs:
            import_module(module)  # a library is not the contender's memory
        self._trainee: Trainee
        self._memory: Peak

    def bind(self) -> int:
        return 0 if self._contender.mpiexec else super().bind()

    def build(self, ports: list[int]) -> dict[str, Any]:
        if not self._contender.one_process and not self._contender.mpiexec:
            self._form_group(ports[0], self._device)
        _load_libraries(self._device)
        self._memory = Peak(self._device)
        name = self._name
        self._trainee = self._build(
            BuildContext(
                self._spec, name.name, dict(name.arguments), self._rank, self._size, self._device, not name.checkout
            )
        )
        trainee = self._trainee
        return {"gpu": gpu_name(self._device), "sent_bytes": trainee.sent_bytes, "notes": trainee.notes}

    def run(self, message: dict[str, Any], barrier: Barrier) -> dict[str, Any]:
        if message["what"] == "communicate":
            return {"seconds": self._communicate(barrier)}
        timed = message["timed"]
        numbers = range(message["first"], message["until"])
        together = timed if self._spec.timing == "burst" else 1
        with no_garbage_collection():
            if timed and message["first"] == self._spec.warmup:
                # From here on, count the memory of training alone, without what building and the first steps needed.
                self._memory.restart()
            steps = [step for group in _group_steps(numbers, together) for step in self._steps(group, barrier)]
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # for the others; the untimed steps of the next burst allocate it again
        return {"steps": steps, "observed": self._trainee.observe()}

    def _steps(self, numbers: Sequence[int], barrier: Barrier) -> list[dict[str, float]]:
        """Run steps that are timed together."""
        batches = [self._batches(number) for number in numbers]
        synchronize(self._device)
        barrier()
        begin = time.perf_counter()
        trained = [self._train(batch, number) for batch, number in zip(batches, numbers, strict=True)]
        synchronize(self._device)
        seconds = (time.perf_counter() - begin) / len(numbers)
        found = []
        for marks, loss in trained:
            phases = {name: sum(self._between(*pair) for pair in marks[name]) for name in PHASES}
            found.append({"seconds": seconds, "loss": float(loss), **phases})
        return found

    def _train(self, batches: list[Batch], number: int) -> tuple[dict[str, list[Any]], torch.Tensor]:
        trainee, count = self._trainee, len(batches)
        marks: dict[str, list[Any]] = {name: [] for name in PHASES}
        total = torch.zeros((), device=self._device)
        for index, (x, y) in enumerate(trainee.microbatches(batches, number)):
            with trainee.no_sync() if index < count - 1 else nullcontext():
                began = self._mark()
                loss = trainee.forward(x, y)
                if index < count:  # and not another rank's lane, run once more for an audit
                    total += loss.detach() / count
                if count > 1 and not trainee.divides_loss:
                    loss = loss / count
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

    def _communicate(self, barrier: Barrier) -> float | None:
        if self._trainee.communicate is None:
            return None
        synchronize(self._device)
        barrier()
        begin = time.perf_counter()
        self._trainee.communicate()
        synchronize(self._device)
        return time.perf_counter() - begin

    def finish(self) -> dict[str, Any]:
        peak = self._memory.nbytes()
        params = self._trainee.params()
        digest = sum(float(param.double().abs().sum()) for param in params) if params else None
        return {"peak_bytes": peak, "digest": digest}

    def close(self) -> None:
        self._trainee.close()
        super().close()


def _group_steps(numbers: Sequence[int], together: int) -> list[Sequence[int]]:
    """The last `together` steps in one group, those before one by one."""
    split = len(numbers) - together if together > 1 else len(numbers)
    alone = [numbers[index : index + 1] for index in range(split)]
    return [*alone, numbers[split:]] if together > 1 else alone


def _load_libraries(device: torch.device) -> None:
    """Train a tiny model for a step: what torch loads on first use is not the contender's memory."""
    spec = StepSpec(model="gpt-tiny")
    model = build_model(spec, device)
    optimizer = build_optimizer(spec, model)
    model(*rank_batches(spec, device, 0, 0)[0]).backward()
    optimizer.step()
