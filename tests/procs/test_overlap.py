"""Over gloo too, a bucket is reduced while backward still computes: forced by a gate, read from the stamps."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.collectives import Op, TorchDistTransport, Work
from paceline.trace import Moment
from tests.models import DDP, draw, mlp
from tests.pool import Pool


class Recording:
    """A transport that keeps the works it has started."""

    def __init__(self, inner: TorchDistTransport) -> None:
        self._inner = inner
        self.works: list[Work] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dup(self, timeout_s: float | None = None) -> "Recording":
        return self

    def all_reduce(self, flat: torch.Tensor, op: Op = Op.SUM) -> Work:
        work = self._inner.all_reduce(flat, op)
        self.works.append(work)
        return work


class Gate(torch.autograd.Function):
    """Passes through; its backward goes on once everything that is in flight has been reduced."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, transport: Recording) -> torch.Tensor:
        ctx.transport = transport
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        works, until = ctx.transport.works, time.monotonic() + 10
        assert len(works) == 4, "the buckets of the layers above the gate have left"
        while not all(work.done() for work in works):
            assert time.monotonic() < until, "they were not reduced while backward runs"
            time.sleep(0.001)
        works.clear()
        return grad, None


class Gated(nn.Module):
    def __init__(self, transport: Recording) -> None:
        super().__init__()
        self.early, self.late = mlp(3, 3), mlp(3, 3, 3)
        self.transport = transport

    def forward(self, x: torch.Tensor) -> Any:
        self.transport.works.clear()
        gated: Any = Gate.apply(self.early(x), self.transport)  # type: ignore[no-untyped-call]
        return self.late(gated)


def flies(rank: int, size: int) -> list[list[tuple[str, int, int]]]:
    assert dist.group.WORLD is not None
    transport = Recording(TorchDistTransport(dist.group.WORLD))
    model = DDP(Gated(transport), transport=transport, bucket_cap_mb=1e-6)
    for _ in range(3):
        model(draw(rank, 2, 3)).sum().backward()
    stamps = model.trace.stamps()
    return [[(s.moment.name, s.bucket, s.ns) for s in stamps if s.backward == backward] for backward in (1, 2, 3)]


def test_buckets_are_reduced_while_backward_runs_from_the_first_step(procs: Pool) -> None:
    for steps in procs(2).run(flies):
        for stamps in steps:
            at = {(name, bucket): ns for name, bucket, ns in stamps}
            launched = [bucket for name, bucket, _ in stamps if name == Moment.LAUNCHED.name]
            assert launched == [0, 1, 2, 3, 4, 5]
            for bucket in range(4):
                assert at["COMPLETED", bucket] < at["BACKWARD_END", -1]
                assert at["LAUNCHED", bucket] < at["READY", 5], "and it left before the last gradient was there"
