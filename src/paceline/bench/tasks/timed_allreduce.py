"""All-reduce of one flat tensor, alone."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline.bench.allreduce import AllReduceSpec
from paceline.bench.contenders import ContenderName
from paceline.bench.tasks import Barrier
from paceline.bench.tasks.process_group import GroupTask, choose_device, gpu_name, synchronize
from paceline.collectives import Transport

Prepared = tuple[torch.Tensor, Callable[[], None]]  # a buffer, and the function that reduces it


class AllReduceTask(GroupTask):
    """Reduces buffers of the sizes that the conductor asks for. A peer with a library of its own derives from it."""

    def __init__(self, spec: AllReduceSpec, contender: str, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name = ContenderName.parse(contender).name
        torch.set_num_threads(spec.threads)
        self._device = choose_device(spec.device if self._name in ("paceline", "nccl") else "cpu", rank, size)
        self._transport: Transport | None = None
        self._nbytes = 0
        self._buffer: torch.Tensor
        self._reduce: Callable[[], None]

    def build(self, ports: list[int]) -> dict[str, Any]:
        self._form_group(ports[0], self._device)
        if self._name != "paceline":
            return {"gpu": gpu_name(self._device), "transport": self._name}
        # Here: they may be another checkout's.
        from paceline.collectives import TorchDistTransport
        from paceline.collectives.choose import choose

        world = dist.group.WORLD
        assert world is not None, "it was just formed"
        # As a replica on this device chooses it.
        self._transport = choose(TorchDistTransport(world), "auto", [self._device], None)
        return {"gpu": gpu_name(self._device), "transport": type(self._transport).__name__}

    def run(self, message: dict[str, Any], barrier: Barrier) -> dict[str, Any]:
        if message["nbytes"] != self._nbytes:
            self._nbytes = message["nbytes"]
            self._buffer, self._reduce = self.prepare(self._nbytes // 4)
        self._check(barrier)
        self._buffer.zero_()
        synchronize(self._device)
        barrier()
        seconds = []
        for _ in range(message["repeats"]):
            begin = time.perf_counter()
            self._reduce()
            synchronize(self._device)
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds}

    def prepare(self, numel: int) -> Prepared:
        transport = self._transport
        if transport is not None:
            from paceline.collectives import finish

            flat = transport.allocate(numel, torch.float32, self._device)
            watch = transport.watch
            return flat, lambda: finish(transport.all_reduce(flat), what="an all-reduce", watch=watch)
        buffer = torch.zeros(numel, device=self._device)

        def reduce() -> None:
            dist.all_reduce(buffer)

        return buffer, reduce

    def _check(self, barrier: Barrier) -> None:
        """Check the sum: a contender that gets it wrong cannot win. First-use costs are not timed either."""
        self._buffer.fill_(self._rank + 1)
        barrier()
        self._reduce()
        synchronize(self._device)
        expected = self._size * (self._size + 1) / 2
        low, high = (float(found) for found in torch.aminmax(self._buffer))
        if (low, high) != (expected, expected):
            raise RuntimeError(f"expected a sum of {expected:g} everywhere, got values between {low:g} and {high:g}")
        # No rank may write into shared memory before all have checked.
        barrier()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        super().close()
