"""One step can be read: from autograd to the wire there are four frames of ours."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import paceline
from paceline.collectives import Op, Transport, Work, run
from tests.models import DDP, mlp

HOME = Path(paceline.__file__).parent
FRAMES = [
    ("reducer/reducer.py", "on_grad_ready"),
    ("reducer/buckets.py", "launch"),
    ("collectives/reduction.py", "__call__"),
]


class Looking:
    """A transport that writes down who asked it to reduce, outermost first."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.seen: list[list[tuple[str, str]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dup(self, timeout_s: float | None = None) -> "Looking":
        return self

    def all_reduce(self, flat: torch.Tensor, op: Op = Op.SUM) -> Work:
        frames = []
        frame: Any = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(HOME) and "threads.py" not in path.name:
                frames.append((str(path.relative_to(HOME)), frame.f_code.co_name))
            frame = frame.f_back
        self.seen.append(frames[::-1])
        return self._inner.all_reduce(flat, op)


def test_a_gradient_reaches_the_wire_in_four_frames() -> None:
    def body(inner: Transport) -> None:
        transport = Looking(inner)
        model = DDP(mlp(3, 4, 4, 2), transport=transport, bucket_cap_mb=1e-6)
        for _ in range(2):
            transport.seen.clear()
            model(torch.ones(1, 3)).sum().backward()
            assert transport.seen == [FRAMES] * 6  # the fourth is all_reduce itself

    run(body, 2)


def test_calling_the_module_adds_no_frame() -> None:
    def body(inner: Transport) -> None:
        transport = Looking(inner)
        model = DDP(nn.Linear(2, 2), transport=transport)
        transport.seen.clear()
        model.module(torch.ones(1, 2)).sum().backward()
        assert transport.seen == [FRAMES]

    run(body, 2)
