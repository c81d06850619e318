"""Updated parameters that come while a rank goes on, over real processes: deaths, ends of scripts, compiled code."""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from tests.models import DDP, draw, mlp
from tests.pool import Pool

compiled_by: Any = torch.compile  # hardly typed


def wrap(placement: str = "zero1", **arguments: Any) -> tuple[Any, Any]:
    model = DDP(mlp(8, 300, 200, 5), placement=placement, transport="torch", timeout=10, **arguments)
    return model, model.optimizer(torch.optim.AdamW, lr=0.01)


def update(model: Any, optimizer: Any, seed: int, forward: Any = None) -> None:
    (model if forward is None else forward)(draw(seed, 4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def pending(model: Any) -> int:
    return sum(type(param) is not nn.Parameter for param in model.module.parameters())


def die_before_the_step(rank: int, size: int, use: str) -> None:
    model, optimizer = wrap()
    update(model, optimizer, rank)
    model(draw(rank, 4, 8)).square().mean().backward()
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    assert pending(model) == 6
    if use == "forward":
        model(draw(rank, 4, 8))
    else:
        model.state_dict()


@pytest.mark.parametrize("use", ["forward", "state_dict"])
def test_a_rank_that_dies_is_named_by_whoever_waits(procs: Pool, use: str) -> None:
    survivor, killed = procs(2).attempt(die_before_the_step, use)
    assert killed.exit_code == -signal.SIGKILL
    assert isinstance(survivor.error, paceline.errors.PeerLost) and survivor.error.ranks == (1,)
    assert "the parameters that other ranks have updated (0.weight to 4.bias)" in str(survivor.error)
    assert survivor.seconds < 10


def interrupted(rank: int, size: int, place: str) -> list[Any]:
    """Rank 0 is interrupted while it waits for rank 1, which has not made its step, and goes on."""
    model, optimizer = wrap()
    model(draw(rank, 4, 8)).square().mean().backward()
    noticed = Path(place)
    while rank and not noticed.exists():
        time.sleep(0.01)
    optimizer.step()
    if rank == 0:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            model(draw(0, 4, 8))
        signal.signal(signal.SIGALRM, before)
        assert pending(model) == 6
        noticed.touch()
    return [param.detach().tolist() for param in model.module.parameters()]


def test_who_is_interrupted_waits_again(procs: Pool, tmp_path: Path) -> None:
    first, second = procs(2).run(interrupted, str(tmp_path / "noticed"))
    assert first == second


SCRIPT = """
import sys, time
from pathlib import Path
import torch, paceline
from tests.models import DDP, draw, mlp
world = paceline.init(device="cpu")
model = DDP(mlp(8, 1200, 1200, 5), placement="zero1", transport="torch", timeout=20)
optimizer = model.optimizer(torch.optim.SGD, lr=0.01)
model(draw(world.rank, 4, 8)).square().mean().backward()
stepped = Path(sys.argv[1])
while world.rank == 1 and not stepped.exists():
    time.sleep(0.01)
optimizer.step()
if world.rank == 1:
    print(sum(float(param.detach().double().sum()) for param in model.parameters()))
stepped.touch()
if world.rank == 0:
    raise ZeroDivisionError("of the test")
paceline.shutdown()
"""


def test_a_script_that_ends_after_its_last_step_leaves_nobody_waiting(tmp_path: Path, reserved_port: int) -> None:
    """Its part of the last update is still to be sent when it ends, here with an error of its own."""
    ranks = []
    for rank in range(2):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved_port), "PYTHONPATH": str(Path.cwd())}
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "stepped")]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    (_, error), (found, other_error) = (rank.communicate(timeout=50) for rank in ranks)
    assert error.strip().endswith("ZeroDivisionError: of the test") and "Lost" not in error, error
    assert ranks[1].returncode == 0, other_error
    assert float(found) == pytest.approx(expected_sum(), rel=1e-9)


def expected_sum() -> float:
    bare = mlp(8, 1200, 1200, 5)
    for rank in range(2):
        (bare(draw(rank, 4, 8)).square().mean() / 2).backward()
    torch.optim.SGD(bare.parameters(), lr=0.01).step()
    return sum(float(param.detach().double().sum()) for param in bare.parameters())


def whole(model: Any) -> Any:
    return compiled_by(model, backend="eager")


def in_place(model: Any) -> Any:
    model.module.compile(backend="eager")
    return model


def one_layer(model: Any) -> Any:
    model.module[2] = compiled_by(model.module[2], backend="eager")
    return model


def a_function(model: Any) -> Any:
    net = model.module

    def weighted(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, net[0].weight, net[0].bias)  # not by a call of the module

    by_hand = compiled_by(weighted, backend="eager")
    return lambda x: model(x) + 0 * by_hand(x).sum()


COMPILED: dict[str, Callable[[Any], Any]] = {
    "whole": whole,
    "in place": in_place,
    "one layer": one_layer,
    "a function": a_function,
}


def compile_after(rank: int, size: int, placement: str, how: str, after: int) -> tuple[list[int], list[Any]]:
    """How much was pending after each step, and the parameters; compiled after so many steps."""
    torch._dynamo.reset()
    model, optimizer = wrap(placement)
    forward: Any = model
    left = []
    for step in range(5):
        if step == after:
            forward = COMPILED[how](model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of torch, about what it asks by itself
            update(model, optimizer, 10 * step + rank, forward)
        left.append(pending(model))
    torch._dynamo.reset()
    return left, [param.detach().tolist() for param in model.module.parameters()]


@pytest.mark.parametrize("how", COMPILED)
def test_what_compiled_code_uses_comes_inside_the_step(procs: Pool, how: str) -> None:
    _, expected = procs(2).run(compile_after, "ddp", how, 2)[0]
    for left, found in procs(2).run(compile_after, "zero1", how, 2):
        assert left == [6, 6, 0, 0, 0]
        assert found == expected


def in_shard_groups(rank: int, size: int, placement: str) -> tuple[int, list[Any]]:
    model, optimizer = wrap(placement, **({} if placement == "ddp" else {"shard": 2}))
    for step in range(3):
        update(model, optimizer, step)  # the same data on all ranks: the order of sums plays no part
    return pending(model), [param.detach().tolist() for param in model.module.parameters()]


def test_shard_groups_gather_among_themselves(procs: Pool) -> None:
    _, expected = procs(4).run(in_shard_groups, "ddp")[0]
    for left, found in procs(4).run(in_shard_groups, "zero2"):
        assert left == 6
        assert found == expected
