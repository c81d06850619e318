"""All-reduce of one flat tensor, alone."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline.bench.contenders import ContenderName
from paceline.bench.spec import AllReduceSpec
from paceline.bench.tasks import LineUp
from paceline.bench.tasks.group import Meeting, choose_device, leave
from paceline.collectives import Transport

AllReduce = Callable[[], None]


class AllReduceTask:
    """Reduces buffers of the sizes that the conductor asks for."""

    def __init__(self, spec: AllReduceSpec, label: str, rank: int, size: int) -> None:
        self._label, self._rank, self._size = ContenderName.parse(label).name, rank, size
        torch.set_num_threads(spec.threads)
        self._device = choose_device("cpu" if self._label in ("gloo", "mpi") else spec.device, rank, size)
        self._meeting = Meeting(rank, size)
        self._transport: Transport | None = None
        self._world: Any = None
        self._nbytes = 0
        self._buffer: torch.Tensor
        self._reduce: AllReduce

    def meet(self) -> int:
        return 0 if self._label == "mpi" else self._meeting.port()

    def build(self, ports: list[int]) -> dict[str, Any]:
        gpu = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else None
        if self._label == "mpi":
            from mpi4py import MPI

            self._world = MPI.COMM_WORLD
            return {"gpu": gpu, "transport": MPI.Get_library_version().split("\n")[0]}
        self._meeting.form(ports[0], self._device)
        if self._label != "paceline":
            return {"gpu": gpu, "transport": self._label}
        # Here: they may be another checkout's.
        from paceline.collectives import TorchDistTransport
        from paceline.collectives.choose import choose

        world = dist.group.WORLD
        assert world is not None, "it was just formed"
        # As a replica on this device chooses it.
        self._transport = choose(TorchDistTransport(world), "auto", [self._device], None)
        return {"gpu": gpu, "transport": type(self._transport).__name__}

    def run(self, message: dict[str, Any], line_up: LineUp) -> dict[str, Any]:
        if message["nbytes"] != self._nbytes:
            self._nbytes = message["nbytes"]
            self._prepare(self._nbytes // 4)
        self._check(line_up)
        self._buffer.zero_()
        self._synchronize()
        line_up()
        seconds = []
        for _ in range(message["repeats"]):
            begin = time.perf_counter()
            self._reduce()
            self._synchronize()
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds}

    def _prepare(self, numel: int) -> None:
        transport = self._transport
        if transport is not None:
            from paceline.collectives import finish

            buffer = transport.allocate(numel, torch.float32, self._device)
            watch = transport.watch
            self._buffer = buffer
            self._reduce = lambda: finish(transport.all_reduce(buffer), what="an all-reduce", watch=watch)
            return
        buffer = torch.zeros(numel, device=self._device)
        self._buffer = buffer
        if self._world is not None:
            from mpi4py import MPI

            world, array = self._world, buffer.numpy()
            self._reduce = lambda: world.Allreduce(MPI.IN_PLACE, array, MPI.SUM)
        else:
            self._reduce = lambda: _dist_all_reduce(buffer)

    def _check(self, line_up: LineUp) -> None:
        """A contender that adds up wrongly cannot win. This also takes first-use costs out of the timed part."""
        self._buffer.fill_(self._rank + 1)
        line_up()
        self._reduce()
        self._synchronize()
        expected = self._size * (self._size + 1) / 2
        low, high = (float(found) for found in torch.aminmax(self._buffer))
        if (low, high) != (expected, expected):
            raise RuntimeError(f"expected a sum of {expected:g} everywhere, got values between {low:g} and {high:g}")
        # Nobody may write into shared memory before all have looked.
        line_up()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def finish(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        leave()


def _dist_all_reduce(buffer: torch.Tensor) -> None:
    dist.all_reduce(buffer)
