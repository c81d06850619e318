"""The pool of processes is itself tested: everything in tests/procs leans on it."""

import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.errors import WorldNotFormed
from tests.pool import Pool, RankFailed


def summed(rank: int, size: int, factor: int) -> tuple[int, int, float]:
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor)
    return rank, size, tensor.item() * factor


def pid(rank: int, size: int) -> int:
    return os.getpid()


def fail_on_one(rank: int, size: int) -> None:
    if rank == 1:
        raise WorldNotFormed("nobody came", missing=[7])
    dist.barrier()


class Unpicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("only one argument is kept")


def fail_unpicklable(rank: int, size: int) -> None:
    raise Unpicklable(1, 2)


def die_on_one(rank: int, size: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def hang_on_one(rank: int, size: int) -> int:
    if rank == 1:
        signal.pause()
    return rank


def litter(rank: int, size: int) -> None:
    os.environ["LITTER"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def look_for_litter(rank: int, size: int) -> tuple[bool, torch.dtype, bool, str, int]:
    threads = torch.get_num_threads()
    return "LITTER" in os.environ, torch.get_default_dtype(), torch.is_grad_enabled(), os.environ["RANK"], threads


def warn(rank: int, size: int) -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def test_runs_on_every_rank_and_gathers_in_order(procs: Pool) -> None:
    assert procs(2).run(summed, 10) == [(0, 2, 30.0), (1, 2, 30.0)]


def test_processes_are_reused(procs: Pool) -> None:
    assert procs(2).run(pid) == procs(2).run(pid)
    assert set(procs(2).run(pid)) <= procs.pids()


def test_an_exception_comes_back_with_its_type_rank_and_traceback(procs: Pool) -> None:
    with pytest.raises(WorldNotFormed) as caught:
        procs(2).run(fail_on_one)
    assert caught.value.missing == (7,)
    notes = "\n".join(caught.value.__notes__)
    assert "on rank 1:" in notes
    assert "in fail_on_one" in notes
    assert procs(2).run(summed, 1)[0][2] == 3.0


def test_an_exception_that_cannot_be_pickled_comes_back_as_text(procs: Pool) -> None:
    with pytest.raises(RankFailed, match="only one argument is kept"):
        procs(2).run(fail_unpicklable)


def test_a_dead_worker_is_reported_and_replaced(procs: Pool) -> None:
    before = procs(2).run(pid)
    outcomes = procs(2).attempt(die_on_one)
    assert outcomes[0].value == 0
    assert outcomes[1].exit_code == -signal.SIGKILL
    after = procs(2).run(pid)
    assert after[0] == before[0]
    assert after[1] != before[1]
    with pytest.raises(RankFailed, match="rank 1 was ended by SIGKILL"):
        procs(2).run(die_on_one)


def test_a_hung_worker_is_killed_at_the_deadline_and_says_where_it_stood(procs: Pool) -> None:
    procs(2).run(pid)  # this module is imported by now
    outcomes = procs(2).attempt(hang_on_one, deadline_s=0.5)
    assert outcomes[0].ok
    assert outcomes[1].hung
    assert outcomes[1].error is not None
    assert "in hang_on_one" in "\n".join(outcomes[1].error.__notes__)
    assert procs(2).run(summed, 1)[1] == (1, 2, 3.0)


def test_a_call_leaves_nothing_for_the_next(procs: Pool) -> None:
    procs(2).run(litter)
    assert procs(2).run(look_for_litter)[1] == (False, torch.float32, True, "1", 1)


def test_warnings_are_errors_in_workers_too(procs: Pool) -> None:
    with pytest.raises(UserWarning, match="careful"):
        procs(2).run(warn)


PARENT = """
import os, sys
sys.path[:] = {path!r}
from tests.pool import Pool
from tests.procs.test_pool import pid
pool = Pool()
print(*pool(1).run(pid), flush=True)
os.kill(os.getpid(), 9)
"""


def test_workers_die_with_the_parent() -> None:
    parent = subprocess.run([sys.executable, "-c", PARENT.format(path=sys.path)], stdout=subprocess.PIPE, check=False)
    assert parent.returncode == -signal.SIGKILL
    orphan = Path(f"/proc/{int(parent.stdout)}/stat")
    # stdout was closed by the worker's end: run() returned only then. A zombie may stay until init reaps it.
    until = time.monotonic() + 5
    with suppress(FileNotFoundError, ProcessLookupError):
        while orphan.read_text().rpartition(")")[2].split()[0] not in "ZX":
            assert time.monotonic() < until, "the worker lives on"
            time.sleep(0.01)
