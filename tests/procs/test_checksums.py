"""Checksums on what lanes send over gloo: the same bits, and a bit that flips on its way is an error on every rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.collectives import TorchDistTransport
from paceline.collectives.protocols import Work
from paceline.errors import MessageDamaged
from paceline.replica.agreement import Agreement
from tests.models import DDP, draw
from tests.pool import Pool


class FlippedOnArrival:
    """A collective of gloo, and one bit of what it has received has flipped when it is complete."""

    def __init__(self, work: Work, received: torch.Tensor, element: int) -> None:
        self._work, self._received, self._element, self._flipped = work, received, element, False

    def done(self) -> bool:
        return self._work.done()

    def wait(self, seconds: float) -> bool:
        if not self._work.wait(seconds):
            return False
        if not self._flipped:
            self._flipped = True
            self._received.view(-1).view(torch.int32)[self._element] ^= 1 << 13
        return True


class BadWire(TorchDistTransport):
    """gloo, over a wire that flips a bit in the collectives with these numbers."""

    def __init__(self, kind: str, numbers: set[int], element: int) -> None:
        assert dist.group.WORLD is not None
        super().__init__(dist.group.WORLD)
        self._kind, self._numbers, self._element, self._count = kind, numbers, element, 0

    def dup(self, *_: Any) -> "BadWire":
        return self

    def _perhaps(self, kind: str, work: Work, out: torch.Tensor) -> Work:
        if kind != self._kind or not out.is_floating_point():
            return work
        self._count += 1
        return FlippedOnArrival(work, out, self._element) if self._count - 1 in self._numbers else work

    def all_to_all(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        return self._perhaps("all_to_all", super().all_to_all(out, flat), out)

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> Work:
        return self._perhaps("all_gather", super().all_gather(out, part), out)


def trained(rank: int, size: int, lanes: int, checksums: bool, kind: str, numbers: list[int]) -> tuple[float, Any]:
    """A digest of the weights after 4 steps, each run again until it succeeds, and the errors."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 5))
    transport = BadWire(kind, set(numbers), element=-1) if rank == 0 else BadWire(kind, set(), 0)
    model: Any = DDP(net, lanes=lanes, transport=transport, agreement=Agreement(checksums=checksums, state_every=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step, errors = 0, []
    while step < 4:
        try:
            for x in model.lanes([draw(100 * step + lane, 4, 9) for lane in model.own_lanes], step):
                model(x).square().mean().backward()
        except MessageDamaged as error:
            errors.append((error.ranks, str(error)))
            assert all(param.grad is None for param in model.parameters())
            continue
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    return sum(float(value.double().sum()) for value in model.module.state_dict().values()), errors


@pytest.mark.parametrize(("size", "lanes"), [(2, 2), (3, 5)])
def test_a_damaged_slice_is_named_and_the_step_can_be_run_again(procs: Pool, size: int, lanes: int) -> None:
    (quiet, _), *_ = procs(size).run(trained, lanes, False, "", [])
    assert {found for found, errors in procs(size).run(trained, lanes, True, "", []) if not errors} == {quiet}
    for kind in ("all_to_all", "all_gather"):
        for weights, errors in procs(size).run(trained, lanes, True, kind, [1]):
            assert weights == quiet
            ((ranks, text),) = errors
            assert ranks == (size - 1,), "who has sent the last slice"
            assert f"from rank {size - 1} to rank 0" in text
            assert "run the step again" in text


def test_without_checksums_nothing_is_noticed(procs: Pool) -> None:
    """So the test above would fail without them."""
    (quiet, _), *_ = procs(3).run(trained, 5, False, "", [])
    assert all(
        weights != quiet and not errors for weights, errors in procs(3).run(trained, 5, False, "all_to_all", [1])
    )
