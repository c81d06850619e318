"""The Checkpointer in a world of one: what is saved comes back, and what cannot be says so."""

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.checkpoint import (
    Checkpointer,
    CheckpointEvent,
    CheckpointMismatch,
    NoCheckpoint,
    NotSaved,
    PerRank,
    Preemption,
    digest,
    rng_state,
    set_rng_state,
)
from paceline.checkpoint.preemption import Cadence
from paceline.checkpoint.state import HostCopy
from paceline.checkpoint.writer import BackgroundWrite
from paceline.collectives import LocalTransport
from paceline.errors import IllegalMove, UsageError
from paceline.stored.directory import LOCK
from tests.models import DDP, mlp


class Run:
    """A small training run with all that a checkpoint must hold: dropout, buffers, momentum, a schedule, a scaler."""

    def __init__(self, width: int = 4, rate: float = 0.01) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(mlp(3, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 2))
        groups: list[dict[str, Any]] = [
            {"params": list(self.model[0].parameters())},
            {"params": list(self.model[1:].parameters()), "lr": 0.1},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=rate)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 5])
        self.step = 0

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def train(self, steps: int) -> str:
        for _ in range(steps):
            self.step += 1
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 3)).square().sum().backward()
            self.optimizer.step()
            self.schedule.step()
        return digest(self.model, self.optimizer, self.step, self.schedule)


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir() if entry.name != LOCK)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("at", [1, 4])
def test_a_resumed_run_ends_with_the_digest_of_the_uninterrupted_one(
    tmp_path: Path, at: int, asynchronous: bool
) -> None:
    run, checkpointer = Run(), Checkpointer(tmp_path, asynchronous=asynchronous)
    run.train(at)
    saved = checkpointer.save(run.step, **run.state, rng=PerRank(rng_state()), cursor={"epoch": 1, "at": (3, None)})
    assert saved.problem is None and not saved.skipped and saved.blocked_s > 0
    expected = run.train(6 - at)  # what is trained while the thread writes must not be in the checkpoint
    checkpointer.wait()

    again = Run(rate=0.5)
    again.train(2)
    loaded = Checkpointer(tmp_path).load(**again.state)
    again.step = loaded.step
    set_rng_state(loaded.more["rng"][0])
    assert (loaded.step, loaded.world_size, loaded.skipped) == (at, 1, ())
    assert loaded.more["cursor"] == {"epoch": 1, "at": (3, None)}
    assert again.train(6 - at) == expected


def test_saves_are_due_by_steps_or_by_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_steps = Checkpointer(tmp_path, every_steps=50)
    assert [step for step in range(201) if by_steps.due(step)] == [50, 100, 150, 200]
    assert not any(Checkpointer(tmp_path).due(step) for step in range(100))
    now = 0.0
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    monkeypatch.setattr("paceline.checkpoint.checkpointer.time", clock)
    by_seconds = Checkpointer(tmp_path, every_seconds=60.0)
    calls = range(5000)  # ranks do not communicate in every one
    assert not any(map(by_seconds.due, calls))
    now = 60.0
    assert any(map(by_seconds.due, calls))
    by_seconds.save(1, note=1)
    assert not any(map(by_seconds.due, calls))
    by_seconds.wait()


def test_ranks_talk_seldom_when_steps_are_short_and_often_when_they_are_long() -> None:
    cadence = Cadence(1000.0, None)
    talks = sum(cadence.ask(False) is not None for _ in range(5000))
    assert 10 <= talks <= 500
    every_call = Cadence(0.0, None)
    assert all(every_call.ask(step == 3) is (step == 3) for step in range(10))


def test_two_are_kept_and_the_newest_is_latest(tmp_path: Path) -> None:
    events: list[CheckpointEvent] = []
    checkpointer = Checkpointer(tmp_path, on_event=events.append)
    assert checkpointer.latest() is None
    for step in (10, 20, 30):
        checkpointer.save(step, note=step)
    checkpointer.wait()
    assert names(tmp_path) == ["step-00000020", "step-00000030"]
    latest = checkpointer.latest()
    assert latest is not None and latest.step == 30
    assert [checkpointer.load(which).more["note"] for which in ("latest", 20, latest, latest.path, tmp_path)] == [
        30,
        20,
        30,
        30,
        30,
    ]
    assert [(event.kind, event.step) for event in events] == [
        ("saved", 10),
        ("saved", 20),
        ("saved", 30),
        ("removed", 10),
    ]


def test_a_damaged_snapshot_is_passed_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, events = Run(), list[CheckpointEvent]()
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    before = run.train(1)
    checkpointer.save(1, **run.state)
    run.train(1)
    checkpointer.save(2, **run.state)
    file = tmp_path / "step-00000002" / "state.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)

    silent = Checkpointer(tmp_path, asynchronous=False)
    for _ in range(2):
        assert silent.load(**Run().state).step == 1
    (said,) = [record.getMessage() for record in caplog.records]
    assert re.search(r"is passed over: step-00000002 \(rank 0\): .*state.safetensors has", said), "once"
    caplog.clear()

    again, reader = Run(), Checkpointer(tmp_path, asynchronous=False, on_event=events.append)
    loaded = reader.load(**again.state)
    assert not caplog.records, "who is told of events says it in words of their own"
    again.step = loaded.step
    assert again.train(0) == before
    assert [(one.path, one.rank) for one in loaded.skipped] == [("step-00000002", 0)]
    assert "state.safetensors has" in loaded.skipped[0].why
    assert [event.kind for event in events] == ["refused"]
    with pytest.raises(NoCheckpoint, match="step-00000002.*state.safetensors has"):
        reader.load(2)
    reader.save(3, **again.state)
    reader.save(4, **again.state)
    assert names(tmp_path) == ["step-00000003", "step-00000004"], "the damaged one is not counted, and goes in the end"


def test_nothing_is_touched_when_the_model_is_another(tmp_path: Path) -> None:
    run, checkpointer = Run(), Checkpointer(tmp_path, asynchronous=False)
    run.train(1)
    checkpointer.save(1, **run.state)
    other = Run(width=5)
    before = other.train(1)
    expected = r"first difference is '0.0.weight': expected float32 of shape \(5, 3\), got float32 of shape \(4, 3\)"
    with pytest.raises(CheckpointMismatch, match=expected):
        checkpointer.load(**other.state)
    assert other.train(0) == before


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (nn.Linear(2, 2, bias=False), "'bias': expected no such tensor, got float32 of shape (2,)"),
        (nn.Bilinear(1, 1, 2), "'weight': expected float32 of shape (2, 1, 1), got float32 of shape (2, 2)"),
        (nn.Linear(2, 2).double(), "'weight': expected float64 of shape (2, 2), got float32 of shape (2, 2)"),
        (nn.ModuleList([nn.Linear(2, 2)]), "'0.weight': expected float32 of shape (2, 2), got no such tensor (but"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, model: nn.Module, what: str) -> None:
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    checkpointer.save(1, model=nn.Linear(2, 2))
    with pytest.raises(CheckpointMismatch, match=re.escape(what)):
        checkpointer.load(model=model)


def test_other_parts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    checkpointer.save(1, model=model, optimizer=torch.optim.SGD(model.parameters()), note=3)
    with pytest.raises(CheckpointMismatch, match="holds the state of SGD, expected that of AdamW"):
        checkpointer.load(optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(CheckpointMismatch, match=r"\[2\] parameters in its groups, expected \[1\]"):
        checkpointer.load(optimizer=torch.optim.SGD([model.weight]))
    with pytest.raises(CheckpointMismatch, match="holds no 'loader': expected it among 'note'"):
        checkpointer.load(loader=nn.Identity())
    with pytest.raises(CheckpointMismatch, match="note cannot be loaded into a int: expected an object with"):
        checkpointer.load(note=5)
    checkpointer.save(2, note=3)
    with pytest.raises(CheckpointMismatch, match="holds no model"):
        checkpointer.load(model=model)
    with pytest.raises(CheckpointMismatch, match="holds no optimizer"):
        checkpointer.load(optimizer=torch.optim.SGD(model.parameters()))


def test_a_run_in_lanes_is_told_what_was_otherwise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def replica(lanes: int | None) -> Any:
        return DDP(mlp(3, 4), transport=LocalTransport(), lanes=lanes)

    run = Checkpointer(tmp_path, asynchronous=False)
    run.save(1, model=replica(8))
    threads = torch.get_num_threads()
    with caplog.at_level(logging.WARNING, "paceline"):
        run.load(model=replica(8))
        run.load(model=replica(None))
        run.load(model=mlp(3, 4))
        assert caplog.messages == []
        torch.set_num_threads(threads + 1)
        try:
            run.load(model=replica(4))
        finally:
            torch.set_num_threads(threads)
    (told,) = caplog.messages
    assert told.endswith(f"then and now: lanes: 8 and 4; threads: {threads} and {threads + 1}")


def test_there_is_nothing_to_load(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "none")
    for which in ("latest", 5, tmp_path / "elsewhere", tmp_path / "step-00000001", Path(__file__)):
        with pytest.raises(NoCheckpoint, match="there is no checkpoint"):
            checkpointer.load(which)
    assert names(tmp_path) == [], "looking writes nothing"


def test_a_save_that_fails_is_told_by_the_next_call_and_training_goes_on(tmp_path: Path) -> None:
    events: list[CheckpointEvent] = []
    checkpointer = Checkpointer(tmp_path / "checkpoints", on_event=events.append)
    checkpointer.save(1, note=1)
    checkpointer.wait()
    (tmp_path / "checkpoints").rename(tmp_path / "aside")
    (tmp_path / "checkpoints").write_text("in the way")
    assert checkpointer.save(2, note=2).problem is None, "not known yet"
    checkpointer.close()
    told = checkpointer.save(3, note=3).problem
    assert told is not None and (told.step, told.rank) == (2, 0)
    assert "step 2 could not be written" in str(told) and "Error" in str(told)
    with pytest.raises(NotSaved, match="step 3"):
        checkpointer.wait()
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "aside").rename(tmp_path / "checkpoints")
    checkpointer.save(4, note=4)
    checkpointer.wait()
    assert names(tmp_path / "checkpoints") == ["step-00000001", "step-00000004"]
    assert [event.kind for event in events] == ["saved", "failed", "failed", "saved"]
    problem = Checkpointer(tmp_path / "checkpoints" / "step-00000004" / "manifest.json", asynchronous=False).save(5)
    assert problem.problem is not None and problem.problem.step == 5, "not asynchronous: known at once"


def test_no_memory_for_the_copy_is_told_like_a_disk_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(self: HostCopy, tensors: object, metadata: object) -> None:
        raise RuntimeError("not enough memory")

    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    monkeypatch.setattr(HostCopy, "take", take)
    problem = checkpointer.save(1, note=torch.ones(1)).problem
    assert problem is not None and "not enough memory" in str(problem)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Holds writers until it is set."""
    opened, run = threading.Event(), BackgroundWrite._run

    def wait_and_run(self: BackgroundWrite) -> None:
        opened.wait(20)
        run(self)

    monkeypatch.setattr(BackgroundWrite, "_run", wait_and_run)
    yield opened
    opened.set()


def test_a_save_waits_for_the_one_before(tmp_path: Path, gate: threading.Event) -> None:
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, note=1)
    threading.Timer(0.2, gate.set).start()
    saved = checkpointer.save(2, note=2)
    checkpointer.wait()
    assert saved.blocked_s >= saved.waited_s >= 0.1
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_save_is_skipped_while_one_is_written(tmp_path: Path, gate: threading.Event) -> None:
    checkpointer = Checkpointer(tmp_path, busy="skip")
    checkpointer.save(1, note=1)
    assert checkpointer.save(2, note=2).skipped
    gate.set()
    checkpointer.wait()
    assert not checkpointer.save(3, note=3).skipped
    checkpointer.wait()
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"keep": 1}, "keep must be a whole number of at least 2, because the newest may be damaged; got 1"),
        ({"every_steps": 0}, "every_steps must be a whole number of at least 1, or None, got 0"),
        ({"every_seconds": 0.0}, "every_seconds must be a number above 0, or None, got 0.0"),
        ({"busy": "drop"}, "busy must be 'wait' or 'skip', got 'drop'"),
    ],
)
def test_arguments_that_cannot_work(tmp_path: Path, arguments: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=re.escape(what)):
        Checkpointer(tmp_path, **arguments)
    with pytest.raises(UsageError, match="step must be a whole number of at least 0, got -1"):
        Checkpointer(tmp_path).save(-1)


def test_a_signal_is_heard_twice_and_earlier_handlers_too() -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        with Preemption(within=0) as preemption:
            assert not preemption.asked and not preemption.agreed()
            os.kill(os.getpid(), signal.SIGTERM)
            assert preemption.asked and preemption.agreed()
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert preemption.signals == [signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1]
            assert received == [signal.SIGUSR1]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert received == [signal.SIGUSR1] * 2 and len(preemption.signals) == 3
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signals_are_heard_in_the_main_thread_only() -> None:
    caught: list[Exception] = []

    def body() -> None:
        try:
            Preemption()
        except IllegalMove as error:
            caught.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
    with pytest.raises(UsageError, match="within must be a number of seconds"):
        Preemption(within=-1)


def test_an_optimizer_over_parameters_in_another_order_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    Checkpointer(tmp_path, asynchronous=False).save(1, model=model, optimizer=optimizer)
    turned = torch.optim.AdamW(reversed(list(model.parameters())))
    with pytest.raises(
        CheckpointMismatch, match=r"'exp_avg' of the optimizer's parameter 0 has shape .2, 3., expected .2,."
    ):
        Checkpointer(tmp_path).load(model=model, optimizer=turned)
