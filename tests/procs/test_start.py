"""Forming a world of real processes, and the ways in which that fails."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.errors import UsageError, WorldError, WorldNotFormed
from paceline.start import get, init, shutdown
from tests.pool import Pool


def listening() -> list[str]:
    """The addresses, as in /proc/net, on which this process listens."""
    targets = [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    inodes = {target[8:-1] for target in targets if target.startswith("socket:")}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1])
    return found


def form_and_ask(rank: int, size: int, port: int) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for generation in range(2):  # the same address must serve a second world
        world = init(master_port=port, timeout=20, device="cpu")
        tensor = torch.tensor([float(world.rank + 1)])
        dist.all_reduce(tensor)
        answers[f"sum {generation}"] = tensor.item()
        answers.update({name: get(name) for name in ("ws", "rank", "grank", "lrank")})
        again = init(device="cpu")
        answers["again"] = (again.rank, again.size, again.local_rank) == (world.rank, world.size, world.local_rank)
        answers["listening"] = [at for at in listening() if at.endswith(f":{port:04X}")]
        shutdown()
    answers["left"] = [at for at in listening() if at.endswith(f":{port:04X}")]
    return answers


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_a_world_forms_twice_and_listens_on_loopback_only(procs: Pool, reserved_port: int, address: str) -> None:
    first, second = procs(2).run(form_and_ask_at, address, reserved_port, group=False)
    assert (first["sum 0"], first["sum 1"]) == (3.0, 3.0)
    assert [first[name] for name in ("ws", "rank", "grank", "lrank")] == [2, 0, 0, 0]
    assert [second[name] for name in ("ws", "rank", "grank", "lrank")] == [2, 1, 1, 1]
    assert first["again"]
    assert second["again"]
    assert first["listening"] == [f"0100007F:{reserved_port:04X}"]
    assert second["listening"] == []
    assert first["left"] == []


def form_and_ask_at(rank: int, size: int, address: str, port: int) -> dict[str, Any]:
    os.environ["MASTER_ADDR"] = address
    return form_and_ask(rank, size, port)


def form_larger(rank: int, size: int, port: int, timeout: float) -> None:
    init(rank=rank, world_size=4, master_port=port, timeout=timeout)


def check_nothing_left(rank: int, size: int, port: int) -> bool:
    return not dist.is_initialized() and not any(at.endswith(f":{port:04X}") for at in listening())


def test_missing_ranks_are_named_on_every_rank(procs: Pool, reserved_port: int) -> None:
    outcomes = procs(2).attempt(form_larger, reserved_port, 1.0, group=False)
    for outcome in outcomes:
        assert isinstance(outcome.error, WorldNotFormed)
        assert outcome.error.missing == (2, 3)
        assert f"rank {outcome.rank} of 4: the world did not form within 1 s; missing: rank 2, rank 3" in str(
            outcome.error
        )
        assert outcome.seconds < 4
    assert procs(2).run(check_nothing_left, reserved_port, group=False) == [True, True]


def form_without_rank_0(rank: int, size: int, port: int) -> None:
    init(rank=1, world_size=2, master_port=port, timeout=0.5)


def test_an_absent_rank_0_is_said_with_its_address(procs: Pool, reserved_port: int) -> None:
    with pytest.raises(WorldNotFormed, match=f"rank 0 could not be reached at 127.0.0.1:{reserved_port}") as caught:
        procs(1).run(form_without_rank_0, reserved_port, group=False)
    assert caught.value.missing == (0,)


def form_with_different_sizes(rank: int, size: int, port: int, sizes: list[int]) -> None:
    init(rank=rank, world_size=sizes[rank], master_port=port, timeout=10)


@pytest.mark.parametrize("sizes", [[2, 3], [3, 2]])
def test_ranks_that_disagree_about_the_size_all_learn_it(procs: Pool, reserved_port: int, sizes: list[int]) -> None:
    for outcome in procs(2).attempt(form_with_different_sizes, reserved_port, sizes, group=False):
        assert isinstance(outcome.error, WorldError)
        assert not isinstance(outcome.error, WorldNotFormed)
        other = 1 - outcome.rank
        said = f"rank {outcome.rank} says {sizes[outcome.rank]} and rank {other} says {sizes[other]};"
        assert f"ranks disagree about the size of the world: {said}" in str(outcome.error)
        assert outcome.seconds < 5


def form_with_a_double(rank: int, size: int, port: int) -> None:
    init(rank=min(rank, 1), world_size=3, master_port=port, timeout=2)


def test_two_processes_with_one_rank_are_told(procs: Pool, reserved_port: int) -> None:
    outcomes = procs(3).attempt(form_with_a_double, reserved_port, group=False)
    messages = [str(outcome.error) for outcome in outcomes]
    assert sum("two processes claim to be rank 1 of 3" in message for message in messages) == 1
    assert sum("missing: rank 2" in message for message in messages) == 2


def form_interrupted(rank: int, size: int, port: int) -> float:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    started = time.monotonic()
    try:
        init(rank=rank, world_size=2, master_port=port, timeout=20)
    except KeyboardInterrupt:
        return time.monotonic() - started
    finally:
        signal.signal(signal.SIGALRM, old)
    raise AssertionError("the world formed with one rank")


@pytest.mark.alone
def test_ctrl_c_ends_the_wait(procs: Pool, reserved_port: int) -> None:
    (seconds,) = procs(1).run(form_interrupted, reserved_port, group=False)
    assert seconds < 0.8


def form_or_die(rank: int, size: int, port: int) -> None:
    if rank == 1:
        # It has announced itself and got the go; the others now wait for it inside the backend.
        dist.init_process_group = lambda *_, **__: os._exit(3)
    init(master_port=port, timeout=2)


def test_a_rank_that_dies_while_the_group_connects_does_not_hold_the_others(procs: Pool, reserved_port: int) -> None:
    outcomes = procs(2).attempt(form_or_die, reserved_port, group=False)
    assert outcomes[1].exit_code == 3
    assert isinstance(outcomes[0].error, WorldNotFormed)
    assert "all 2 ranks arrived, but the 'gloo' group could not connect" in str(outcomes[0].error)
    assert outcomes[0].seconds < 8


def test_a_taken_port_is_said(procs: Pool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WorldError, match=f"rank 0 cannot listen at 127.0.0.1:{port}: Address already in use"):
            procs(1).run(form_larger, port, 5.0, group=False)


def form_again_differently(rank: int, size: int) -> None:
    init(rank=rank, world_size=size + 1)


def test_contradicting_an_existing_group_is_refused(procs: Pool) -> None:
    # The worker of the test before failed to form a group; that must not matter to the next one.
    with pytest.raises(UsageError, match="already formed with world_size=2, got world_size=3"):
        procs(2).run(form_again_differently)


TORCHRUN_SCRIPT = """
import paceline.start as start, torch, torch.distributed as dist
for _ in range(2):
    world = start.init(timeout=20, device="cpu")
    tensor = torch.tensor([world.rank + 1])
    dist.all_reduce(tensor)
    start.shutdown()
    print(f"<{world.rank} {world.size} {world.local_rank} {tensor.item()}>", flush=True)
"""


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(TORCHRUN_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall("<.*?>", done.stdout)) == ["<0 2 0 3>", "<0 2 0 3>", "<1 2 1 3>", "<1 2 1 3>"]
