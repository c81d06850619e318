"""Deaths, absences, Ctrl-C and disagreement in the middle of training, on real processes over gloo."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import BackwardAborted, ModelMismatch, PeerAbsent, PeerLost, ReplicasDiffer
from tests.interrupt import interrupt_blocked_rank
from tests.models import DDP, assert_same_bits, draw, mlp, packed, unpacked, values
from tests.pool import Pool
from tests.procs.test_waits import hear, say

ONE_EACH = 1e-6  # MiB: a bucket per parameter


class Trip(torch.autograd.Function):
    """Passes through; its backward calls what it was given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Any) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return grad, None


class Tripped(nn.Module):
    """Calls `trip` in the middle of backward, when the buckets of the upper half have left."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = mlp(3, 3), mlp(3, 3)
        self.trip: Any = lambda: None

    def forward(self, x: torch.Tensor) -> Any:
        tripped: Any = Trip.apply(self.lower(x), lambda: self.trip())  # type: ignore[no-untyped-call]
        return self.upper(tripped)


def step(model: Any, rank: int) -> None:
    model.zero_grad()
    model(draw(rank, 2, 3)).square().sum().backward()


# ----------------------------------------------------------------------------------------------------------- a death


def die_in_backward(rank: int, size: int) -> tuple[str, tuple[int, ...], float]:
    model = DDP(Tripped(), bucket_cap_mb=ONE_EACH)
    step(model, rank)

    def die() -> None:
        say("killed at", time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        model.module.trip = die
    with pytest.raises(PeerLost) as caught:
        step(model, rank)
    return str(caught.value), caught.value.ranks, time.monotonic() - float(hear("killed at"))


def test_a_rank_killed_in_its_backward_is_named_on_the_others(procs: Pool) -> None:
    outcomes = procs(3).attempt(die_in_backward)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.ok, outcome.error
        message, ranks, seconds = outcome.value
        assert ranks == (1,)
        assert "rank 1" in message
        assert seconds < 3


# --------------------------------------------------------------------------------------------------------- absence


def do_not_come(rank: int, size: int) -> tuple[str, tuple[int, ...]]:
    dist.barrier()
    model = DDP(Tripped(), timeout=1.5)
    step(model, rank)
    if rank == 1:
        hear("missed")
        return "", ()
    with pytest.raises(PeerAbsent) as caught:
        step(model, rank)
    say("missed")
    return str(caught.value), caught.value.ranks


def test_a_rank_that_does_not_come_is_missed_at_the_timeout(procs: Pool) -> None:
    message, ranks = procs(2).run(do_not_come)[0]
    assert ranks == (1,)
    assert "in bucket 0 of backward 2 for rank 1, which exceeds timeout=1.5 s" in message


# ----------------------------------------------------------------------------------------------- a failed backward


def fail_in_backward(rank: int, size: int) -> bytes:
    model = DDP(Tripped(), bucket_cap_mb=ONE_EACH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail() -> None:
        raise ZeroDivisionError("mine")

    for number in range(4):
        model.module.trip = fail if (rank, number) == (1, 1) else lambda: None
        try:
            step(model, rank)
        except (ZeroDivisionError, BackwardAborted) as error:
            assert number == 1
            assert isinstance(error, ZeroDivisionError if rank == 1 else BackwardAborted)
            continue
        optimizer.step()
    return packed(values(model))


def three_good_steps(rank: int, size: int) -> bytes:
    model = DDP(Tripped(), bucket_cap_mb=ONE_EACH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, rank)
        optimizer.step()
    return packed(values(model))


def test_a_backward_that_fails_on_one_rank_is_a_step_that_never_was(procs: Pool) -> None:
    failed = procs(3).run(fail_in_backward)
    for got, expected in zip(failed, procs(3).run(three_good_steps), strict=True):
        assert_same_bits(unpacked(got), unpacked(expected))


# ------------------------------------------------------------------------------------------------------------ Ctrl-C


BLOCKED = """
import sys
import torch, torch.distributed as dist
import paceline
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
model = paceline.DistributedDataParallel(torch.nn.Linear(100, 100))
model(torch.ones(1, 100)).sum().backward()
if rank == 1:
    print("ready", flush=True)
    sys.stdin.read()
    raise SystemExit
loss = model(torch.ones(1, 100)).sum()
try:
    print("ready", flush=True)
    loss.backward()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(7)
"""


@pytest.mark.alone
def test_ctrl_c_ends_a_blocked_backward_and_the_process(tmp_path: Path) -> None:
    interrupt_blocked_rank(BLOCKED, str(tmp_path / "store"))


def interrupt_in_place(rank: int, size: int) -> float:
    model = DDP(Tripped(), bucket_cap_mb=ONE_EACH)
    step(model, rank)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if rank == 1:
            pid = int(hear("blocked"))
            say("sent at", time.monotonic())
            os.kill(pid, signal.SIGINT)
            hear("interrupted")
            return 0.0
        model.module.trip = lambda: say("blocked", os.getpid())
        with pytest.raises(KeyboardInterrupt):
            step(model, rank)
        ended = time.monotonic()
        say("interrupted")
        return ended - float(hear("sent at"))
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.alone
def test_an_interrupted_backward_raises_in_place(procs: Pool) -> None:
    assert procs(2).run(interrupt_in_place)[0] < 0.3


# ---------------------------------------------------------------------------------------------------- disagreement


def named(**params: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, value in params.items():
        module.register_parameter(name, nn.Parameter(value))
    return module


def with_buffer(size: int) -> nn.Module:
    module = named(a=torch.zeros(2))
    module.register_buffer("steps", torch.zeros(size))
    return module


def different(what: str, rank: int) -> nn.Module:
    first, second = torch.zeros(2, 3), torch.zeros(3)
    if rank == 0:
        return with_buffer(2) if what == "buffer" else named(a=first, b=second)
    models = {
        "name": lambda: named(a=first, c=second),
        "order": lambda: named(b=second, a=first),
        "count": lambda: named(a=first),
        "shape": lambda: named(a=first, b=torch.zeros(1000)),
        "dtype": lambda: named(a=first.double(), b=second),
        "stride": lambda: named(a=torch.zeros(3, 2).t(), b=second),
        "requires_grad": lambda: named(a=first, b=second).requires_grad_(False),
        "buffer": lambda: with_buffer(100_000),
    }
    return models[what]()


def disagree(rank: int, size: int, what: str) -> tuple[str, float]:
    dist.barrier()
    started = time.monotonic()
    with pytest.raises(ModelMismatch) as caught:
        DDP(different(what, rank))
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("what", ["name", "order", "count", "shape", "dtype", "stride", "requires_grad", "buffer"])
def test_different_models_are_an_error_on_every_rank_at_once(procs: Pool, what: str) -> None:
    outcomes = procs(2).attempt(disagree, what, deadline_s=10)
    for outcome in outcomes:
        assert outcome.ok, outcome
        assert outcome.value[1] < 2
    assert outcomes[0].value[0] == outcomes[1].value[0]


def verify(rank: int, size: int) -> str:
    module = mlp(3, 2, seed=rank)
    before = values(module)
    with pytest.raises(ReplicasDiffer, match="set the same seed before building the model") as caught:
        DDP(module, init="verify")
    assert_same_bits(dict(values(module)), dict(before))
    return str(caught.value)


def test_unequal_seeds_are_found_on_every_rank(procs: Pool) -> None:
    messages = procs(3).run(verify)
    assert len(set(messages)) == 1
    assert "all 3 ranks differ in 0.weight. The first difference is element [0, 0]" in messages[0]
