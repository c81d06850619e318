"""Real runs of the benchmark, as small as they can be."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks.hooks_cost import HooksSpec, run_hooks
from paceline.bench.allreduce import AllReduceSpec, run_allreduce
from paceline.bench.command import exit_code
from paceline.bench.commands import COMMANDS
from paceline.bench.conductor import Conductor, no_log
from paceline.bench.machinery import MachinerySpec, run_machinery
from paceline.bench.messages import receive
from paceline.bench.processes import Order
from paceline.bench.spec import StepSpec
from paceline.bench.step_comparison import StepComparison, run_steps
from paceline.bench.step_report import step_tables
from paceline.bench.tables import render

pytestmark = pytest.mark.timeout(120)  # a dozen processes import torch
BROKEN = "fsdp2:no_such_argument=1"
PEERS = f"{Path(__file__).parents[2]}/benchmarks/peers"
TENSORFLOW, FUSION = f"{PEERS}/tensorflow_mirrored.py:tensorflow", f"{PEERS}/horovod_fusion.py:fusion"
ELSEWHERE = f"paceline@{Path(__file__).parents[2]}"


@pytest.fixture(scope="module")
def report() -> StepComparison:
    contenders = ("floor", "paceline", "torch", BROKEN, TENSORFLOW, FUSION, ELSEWHERE, "lanes")
    spec = StepSpec(model="gpt-tiny", steps=4, burst=2, warmup=1, accumulate=2, contenders=contenders, timeout=80.0)
    return run_steps(spec)


def test_every_contender_runs_and_agrees(report: StepComparison) -> None:
    for label in ("floor", "paceline", "torch", "lanes"):
        found = report.result(label)
        assert found is not None, (label, [(r.label, r.state, r.message, r.log) for r in report.contenders])
        assert [len(turn) for turn in found.samples_s] == [2, 2]
        assert len(found.losses) == 1 + 2 * (1 + 2)
        assert found.median_s is not None and found.median_s > 0
        assert found.peak_bytes is not None and found.peak_bytes > 0
        assert found.to_torch is not None and found.to_floor is not None
        assert found.phases_s.keys() == {"forward", "backward", "optimizer"}
    ours, floor = report.result("paceline"), report.result("floor")
    assert ours is not None and floor is not None
    assert ours.agrees is True and ours.loss_difference == 0.0 and ours.replicas_equal is True
    assert ours.overlap is not None and 0.0 <= ours.overlap <= 1.0 and ours.overlap_from == "trace"
    assert ours.bucket_bytes and ours.sent_bytes == report.gradient_bytes
    lanes = report.result("lanes")
    assert lanes is not None and lanes.agrees is True and lanes.replicas_equal is True
    assert floor.replicas_equal is False, "nobody told its ranks to be equal"


def test_another_checkout_is_a_contender(report: StepComparison) -> None:
    found = report.result(ELSEWHERE)
    assert found is not None, [(r.label, r.message, r.log) for r in report.contenders]
    assert found.agrees is True and found.loss_difference == 0.0 and found.replicas_equal is True
    assert ELSEWHERE in report.circumstances.versions


def test_a_contender_may_come_from_a_file(report: StepComparison) -> None:
    found = report.result(FUSION)
    assert found is not None, [(r.label, r.message, r.log) for r in report.contenders]
    assert found.agrees is True and found.replicas_equal is True
    assert "\nfusion  " in render(step_tables(report)[0])


def test_a_contender_that_fails_is_told_and_stops_nobody(report: StepComparison) -> None:
    broken = next(found for found in report.contenders if found.label == BROKEN)
    assert broken.state == "failed"
    assert "TypeError" in broken.message and "no_such_argument" in broken.message
    assert "\n" not in broken.message
    assert "Traceback" in broken.log or "no_such_argument" in broken.log
    assert exit_code(report) == 1


def test_a_missing_peer_is_named(report: StepComparison) -> None:
    missing = next(found for found in report.contenders if found.label == TENSORFLOW)
    if missing.state != "not installed":
        pytest.skip("tensorflow is installed here")
    assert "tensorflow: not installed: tensorflow: pip install 'paceline[peers]'" in render(step_tables(report)[0])


def test_the_report_is_json(report: StepComparison) -> None:
    data = json.loads(json.dumps(asdict(report)))
    assert data["contenders"][0]["label"] == "floor"
    assert data["spec"]["model"] == "gpt-tiny"


def test_all_reduce_is_measured_and_checked() -> None:
    found = run_allreduce(
        AllReduceSpec(sizes="4KiB,64KiB", rounds=1, contenders=("paceline", "gloo", "nccl"), timeout=50.0)
    )
    assert found.absent == {"nccl": "runs on cuda only"}
    assert {(row.label, row.nbytes) for row in found.rows} == {
        (label, nbytes) for label in ("paceline", "gloo") for nbytes in (4096, 65536)
    }
    ours = next(row for row in found.rows if row.label == "paceline")
    assert ours.median_s > 0
    assert found.transport


def test_hooks_are_measured() -> None:
    found = run_hooks(HooksSpec(parameters="20,60", worlds="1", rounds=2, contenders=("paceline", "torch"), timeout=50))
    assert not found.failures
    assert [(row.label, row.world, row.parameters) for row in found.rows] == [
        ("paceline", 1, [20, 60]),
        ("torch", 1, [20, 60]),
    ]
    assert all(row.to_torch is not None and row.to_torch.value > 0 for row in found.rows)


def test_the_machinery_is_measured_beside_itself_and_another_checkout() -> None:
    contenders = ("bare", "bare", "torch", "paceline", "no-agreement", ELSEWHERE)
    spec = MachinerySpec(model="gpt-tiny", rounds=2, burst=2, settle=1, warmup=2, contenders=contenders, timeout=80.0)
    found = run_machinery(spec)
    assert [result.label for result in found.contenders] == ["bare", "bare (A/A)", *contenders[2:]]
    assert found.tensors == 29
    for result in found.contenders:
        assert result.state == "ok", (result.label, result.message, result.log)
        assert [len(turn) for turn in result.samples_s] == [1, 1] and len(result.losses) == 2
        assert result.label == "bare" or (result.to_bare is not None and result.loss_difference == 0.0)
    assert ELSEWHERE in found.circumstances.versions
    assert exit_code(found) == 0


def test_one_rank_takes_the_path_of_several() -> None:
    code = """
import torch, torch.distributed as dist
import paceline
from paceline.bench.contenders.ours import _counting_as_several

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
transport = _counting_as_several()
reduced = []
def all_reduce(flat, *rest, start=transport.all_reduce):
    reduced.append(flat.numel())
    return start(flat, *rest)
transport.all_reduce = all_reduce
model = paceline.DistributedDataParallel(torch.nn.Linear(64, 8), transport=transport)
model(torch.ones(2, 64)).sum().backward()
print(sum(reduced))
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    assert int(done.stdout) >= 64 * 8 + 8, "gradients were reduced, which a rank that is alone leaves where they are"


def test_one_rank_that_fails_takes_its_contender_out_of_the_run() -> None:
    orders = [Order(label, "unheard.of:Task", label, None, 2, 1, "cpu") for label in ("one", "two")]
    said: list[str] = []
    with Conductor(orders, timeout_s=30.0, log=said.append) as conductor:
        assert conductor.labels == []
        assert conductor.ask("one", "run", {}) is None
        assert list(conductor.in_turns(3)) == []
        assert conductor.failures.keys() == {"one", "two"}
        for failure in conductor.failures.values():
            assert "No module named 'unheard'" in str(failure)
            assert len(failure.log.splitlines()) <= 5
    assert any("one failed: rank" in line for line in said)


def test_a_missing_launcher_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("paceline.bench.processes.sys.executable", str(tmp_path / "python"))
    order = Order("mpi4py", "step", "mpi4py", None, 2, 1, "cpu", mpiexec=True)
    with Conductor([order], timeout_s=5.0, log=no_log) as conductor:
        assert str(conductor.failures["mpi4py"]) == "mpiexec was not found; pip install mpich"


def test_a_worker_ends_when_its_conductor_hangs_up(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "conductor"))
        listener.listen()
        command = [sys.executable, "-m", "paceline.bench.worker", str(tmp_path / "conductor"), "floor", "0"]
        with subprocess.Popen(command) as worker:
            connection = Connection(listener.accept()[0].detach())
            assert receive(connection) == ("floor", 0)
            connection.close()
            assert worker.wait(10.0) == 1


def test_ctrl_c_ends_everything_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline.bench", "step", "--model", "gpt-tiny", "--ranks", "1"]
    command += ["--contenders", "floor", "--steps", "1000000"]
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environ
    ) as process:
        assert process.stderr is not None
        assert any(line.startswith("round 1 ") for line in process.stderr)
        started = descendants(process.pid)
        assert len(started) == 2, "a worker and what has started it"
        process.send_signal(signal.SIGINT)
        assert process.wait(20.0) == 130
    assert not any(Path(f"/proc/{pid}").exists() for pid in started), "the conductor has waited for them"
    assert not list(tmp_path.glob("paceline-*"))


def test_no_worker_outlives_a_conductor_that_is_killed() -> None:
    command = [sys.executable, "-m", "paceline.bench", "step", "--model", "gpt-tiny", "--ranks", "2"]
    command += ["--contenders", "torch", "--steps", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any(line.startswith("round 1 ") for line in process.stderr)
        workers = descendants(process.pid)
        assert len(workers) >= 2
        process.kill()
    deadline = time.monotonic() + 10.0
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "workers are left"
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """All processes below one, in which any thread may have started them."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return children + [one for child in children for one in descendants(child)]


def test_the_default_is_the_step_comparison() -> None:
    assert next(iter(COMMANDS)) == "step"
    assert COMMANDS["step"].spec().contenders == ("floor", "paceline", "torch")
