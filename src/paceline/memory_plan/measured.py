"""What a step really took, beside what was planned."""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.memory_plan.numbers import show_bytes
from paceline.memory_plan.states import PlanError
from paceline.memory_plan.text import layout
from paceline.memory_plan.value import MemoryPlan, RankPlan

STATUS = Path("/proc/self/status")
ROLLUP = Path("/proc/self/smaps_rollup")
CLEAR = Path("/proc/self/clear_refs")


class Peak:
    """The highest memory of this process's tensors since a starting point.

    On a GPU that is what torch's allocator handed out. On the CPU it is what the process grew by: make the peak before
    the model is built and after a plan, which loads parts of torch. `restart` looks for the highest point from there
    on. The optimizer makes its states in the first step, so the second is the first that is like all others.

        peak = Peak("cpu")
        model = build()
        peak.restart()
        step()
        step()
        print(plan.against(peak.nbytes()))
    """

    def __init__(self, device: Any = "cpu") -> None:
        self._device = str(device)
        if self._device.split(":")[0] not in ("cpu", "cuda"):
            raise PlanError(f"device={self._device!r}: expected cpu or cuda")
        self._before = 0
        self.restart()
        if not self._on_gpu:
            self._before = _kib(STATUS, "VmRSS")

    @property
    def _on_gpu(self) -> bool:
        return self._device.startswith("cuda")

    def restart(self) -> None:
        """Look for the highest point from here on; the starting point stays where it was."""
        gc.collect()
        if self._on_gpu:
            import torch

            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _clear_mark()

    def nbytes(self) -> int:
        """Pages of shared memory count by this process's part of them: every rank maps them, and they exist once."""
        if self._on_gpu:
            import torch

            torch.cuda.synchronize(self._device)
            return int(torch.cuda.max_memory_allocated(self._device))
        mapped_twice = _kib(STATUS, "RssShmem") - _kib(ROLLUP, "Pss_Shmem")
        return max(0, _kib(STATUS, "VmHWM") - self._before - mapped_twice) * 1024


@dataclass(frozen=True, slots=True)
class Comparison:
    """A plan beside a measurement."""

    planned_bytes: int
    measured_bytes: int

    @property
    def off(self) -> float:
        """0.05: the plan is 5 % above what was measured."""
        return self.planned_bytes / self.measured_bytes - 1


def compare(
    plan: MemoryPlan | RankPlan, measured_bytes: int, *, ranks: int | None = None, first_step: bool = False
) -> Comparison:
    """Set a plan beside a measurement, for one size of the world.

    `first_step`: the measurement ends with the very first step, in which the optimizer's states come last.
    """
    if measured_bytes <= 0:
        raise PlanError(f"measured_bytes={measured_bytes}: expected a number above 0")
    chosen = plan if isinstance(plan, RankPlan) else plan.by_ranks[0] if ranks is None else plan.at(ranks)
    return Comparison(chosen.first_step_total if first_step else chosen.total, measured_bytes)


def against(plan: MemoryPlan, measured_bytes: int, *, ranks: int | None = None, first_step: bool = False) -> str:
    """Plan against measured as text: the lines of the plan, then both totals."""
    compared = compare(plan, measured_bytes, ranks=ranks, first_step=first_step)
    chosen = plan.by_ranks[0] if ranks is None else plan.at(ranks)
    moment = chosen.peak
    rows = [[line.name, show_bytes(line.nbytes), line.formula] for line in moment.lines]
    if first_step:
        moment = max(chosen.moments, key=lambda moment: moment.total_in_first_step)
        late = 0 if moment.is_update else 1
        rows = [
            [line.name, show_bytes(line.nbytes - late * line.late_bytes), line.formula]
            for line in moment.lines
            if line.nbytes - late * line.late_bytes
        ]
    total = ["planned", show_bytes(compared.planned_bytes), f"at its highest: {moment.name}"]
    found = ["measured", show_bytes(measured_bytes), f"the plan is {compared.off:+.1%}"]
    return "\n".join(layout([["memory of one rank", "bytes", "how"], None, *rows, None, total, found]))


def _clear_mark() -> None:
    try:
        CLEAR.write_text("5")
    except OSError as error:
        raise PlanError(f"the peak of memory cannot be measured here: {CLEAR} cannot be written: {error}") from error


def _kib(file: Path, key: str) -> int:
    if not file.exists():
        raise PlanError(f"the peak of memory cannot be measured here: there is no {file}")
    for line in file.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    return 0
