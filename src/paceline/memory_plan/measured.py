"""What a step really took."""

import gc
from pathlib import Path
from typing import Any

from paceline.memory_plan.numbers import PlanError

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


def _clear_mark() -> None:
    try:
        CLEAR.write_text("5")
    except OSError as error:
        raise PlanError(f"peak memory cannot be measured here: {CLEAR} cannot be written: {error}") from error


def _kib(file: Path, key: str) -> int:
    if not file.exists():
        raise PlanError(f"peak memory cannot be measured here: there is no {file}")
    for line in file.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    return 0
