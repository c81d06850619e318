"""Faults as values, and what they do in the process that they happen in."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline import faults
from paceline.errors import IllegalMove, UsageError
from paceline.faults.fault import FAULTS_NAME, PLACES, asked_for, format_all, once_less
from paceline.faults.inject import flip_bit
from paceline.launch.rehearsal import Rehearsal
from paceline.progress import Phase, Progress, own_progress


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process notes its progress for no launcher, and has forgotten it afterwards."""
    monkeypatch.setattr(Progress, "_own", Progress())
    yield
    faults.disarm()


@pytest.mark.parametrize(
    "text",
    [
        "kill rank=1 step=20",
        "stop rank=0 step=5 where=backward seconds=10",
        "raise rank=all step=0 times=3",
        "exit rank=0 step=1 code=9",
        "flip rank=2 step=7 tensor=3 bit=22",
        "scale rank=1 step=3 factor=1.5",
        "disk-full rank=0 step=40",
        "slow rank=0 step=1 seconds=0.25",
    ],
)
def test_a_fault_is_read_as_it_is_written(text: str) -> None:
    fault = faults.parse(text)
    assert str(fault) == text
    assert faults.parse_all(format_all((fault, fault))) == (fault, fault)


def test_a_fault_says_where_it_happens_if_nobody_else_does() -> None:
    assert faults.parse("kill rank=0 step=1").phase is Phase.FORWARD
    assert faults.parse("disk-full rank=0 step=1").phase is Phase.CHECKPOINT
    for kind in faults.KINDS:
        more = " seconds=1" if kind == "slow" else ""
        assert faults.parse(f"{kind} rank=0 step=1{more}").where in PLACES


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kil rank=1 step=2", "there is no fault 'kil' (did you mean 'kill'?)"),
        ("", "there is no fault ''"),
        ("kill step=2", "rank= is missing"),
        ("kill rank=1", "step= is missing"),
        ("kill rank=1 step=-2", "step='-2' is not possible; expected a whole number of at least 0"),
        ("kill rank=one step=2", "expected a whole number of at least 0, or all"),
        ("kill rank=1 step=2 step=3", "step= is given twice"),
        ("kill rank=1 step=2 were=data", "'were=data' is not understood (did you mean 'where'?)"),
        ("kill rank=1 step=2 now", "'now' is not understood"),
        ("kill rank=1 step=2 where=lunch", "where='lunch' is not known: expected one of start"),
        ("kill rank=1 step=2 seconds=3", "fault kill takes no seconds="),
        ("kill rank=1 step=2 times=0", "times=0 is not possible: expected at least 1"),
        ("stop rank=1 step=2 seconds=nan", "seconds=nan is not possible"),
        ("flip rank=1 step=2 bit=64", "bit=64 is not possible: expected at least 0 and at most 63"),
        ("slow rank=1 step=2", "expected seconds="),
    ],
)
def test_a_fault_that_cannot_be_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        faults.parse(text)
    assert words in str(caught.value)


def test_the_variable_and_the_flags_add_up() -> None:
    found = asked_for({FAULTS_NAME: "kill rank=0 step=1;"}, ["raise rank=1 step=2"])
    assert [fault.kind for fault in found] == ["kill", "raise"]


def test_what_has_happened_is_not_given_to_ranks_that_start_later() -> None:
    twice, once = faults.parse("kill rank=0 step=1 times=2"), faults.parse("raise rank=1 step=2")
    rehearsal = Rehearsal((twice, once))
    rehearsal.on_report("step", {"fault": str(once)})
    assert rehearsal.left == (twice, once)
    rehearsal.on_report("fault", {"fault": str(twice)})
    assert rehearsal.environment() == {FAULTS_NAME: "kill rank=0 step=1; raise rank=1 step=2"}
    for fault in rehearsal.left:
        rehearsal.on_report("fault", {"fault": str(fault)})
    assert rehearsal.environment() == {FAULTS_NAME: ""}
    assert rehearsal.unmet() == ""
    assert Rehearsal(()).environment() == {}
    assert "never happened: raise rank=1 step=2." in Rehearsal((once,)).unmet()
    assert once_less((twice,), once) == (twice,)


def test_a_fault_happens_once_at_its_step_and_place(progress: None) -> None:
    faults.arm("raise rank=0 step=3 where=backward", "raise rank=1 step=0")
    own_progress().note(Phase.BACKWARD, 2)
    own_progress().note(Phase.FORWARD, 3)
    with pytest.raises(faults.InjectedFault, match="this is the injected fault raise rank=0 step=3 where=backward"):
        own_progress().note(Phase.BACKWARD)
    own_progress().note(Phase.BACKWARD)
    assert [str(fault) for fault in faults.disarm()] == ["raise rank=1 step=0"]
    assert faults.disarm() == ()


def test_a_process_may_say_which_rank_it_is(progress: None) -> None:
    faults.arm("raise rank=5 step=0", rank=5)
    with pytest.raises(faults.InjectedFault):
        own_progress().note(Phase.FORWARD)
    with pytest.raises(UsageError, match="rank must be a whole number"):
        faults.arm("raise rank=5 step=0", rank=-1)


def test_another_launcher_that_restarts_ranks_has_the_fault_once(
    progress: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULTS_NAME, "raise rank=0 step=0; raise rank=0 step=1 times=2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(Progress, "_own", None)
    own_progress()
    assert [str(fault) for fault in faults.disarm()] == ["raise rank=0 step=1"]


def test_a_slow_rank_is_slow_once_a_step(progress: None) -> None:
    faults.arm("slow rank=0 step=1 seconds=0.05")
    took = []
    for step in range(4):
        began = time.monotonic()
        own_progress().note(Phase.FORWARD, step)
        own_progress().note(Phase.FORWARD)
        took.append(time.monotonic() - began)
    assert took[0] < 0.05 <= min(took[1:]) and max(took[1:]) < 0.1


def test_a_full_disk_lets_nothing_be_written_for_a_while(progress: None, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.write_text("old")
    faults.arm("disk-full rank=0 step=0 where=save seconds=0.2")
    own_progress().note(Phase.CHECKPOINT)
    with pytest.raises(OSError, match="No space left on device"):
        (tmp_path / "new").write_text("new")
    with pytest.raises(OSError, match="No space left on device"):
        (tmp_path / "folder").mkdir()
    assert there.read_text() == "old"
    while True:
        try:
            (tmp_path / "new").write_text("new")
            return
        except OSError:
            time.sleep(0.02)


def trained() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_numbers_are_changed_on_purpose(progress: None) -> None:
    model, optimizer = trained()
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    moment = optimizer.state[model.weight]["momentum_buffer"].clone()
    faults.arm("flip rank=0 step=0 tensor=1 bit=31", "flip-state rank=0 step=0 tensor=0")
    faults.arm("nan rank=0 step=1", "scale rank=0 step=1 tensor=1 factor=3")
    own_progress().note(Phase.FORWARD, 0)
    assert torch.equal(model.weight, weight)
    assert model.bias[0] == -bias[0] and model.bias[1] == bias[1]
    assert (optimizer.state[model.weight]["momentum_buffer"] != moment).sum() == 1
    own_progress().note(Phase.FORWARD, 1)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        assert model.weight.grad is not None and model.bias.grad is not None
        spoilt, scaled = int(model.weight.grad.isnan().sum()), model.bias.grad.tolist()
        assert (spoilt, scaled) in ((1, [3.0, 3.0]), (0, [1.0, 1.0]))
    assert (spoilt, scaled) == (0, [1.0, 1.0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bit", [0, 7, -1])
def test_one_bit_flips_and_flips_back(dtype: torch.dtype, bit: int) -> None:
    tensor = torch.ones(3, 2, dtype=dtype).t()
    bits = 8 * tensor.element_size()
    fault = faults.parse(f"flip rank=0 step=0 bit={bit % bits}")
    flip_bit(tensor, fault)
    assert (tensor != 1).sum() == 1 and tensor[0, 0] != 1
    flip_bit(tensor, fault)
    assert (tensor == 1).all()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("flip rank=0 step=0 tensor=10000", "parameters; expected tensor= below that"),
        ("flip rank=0 step=0 bit=32", "elements have 32 bits"),
        ("kill-worker rank=0 step=0", "this rank has no DataLoader worker now"),
    ],
)
def test_a_fault_that_finds_nothing_to_break_says_so(progress: None, text: str, words: str) -> None:
    kept = trained()
    faults.arm(text)
    with pytest.raises(IllegalMove, match=words):
        own_progress().note(Phase.FORWARD)
    assert kept


def test_a_child_of_the_rank_has_no_faults(progress: None) -> None:
    faults.arm("exit rank=0 step=0 code=77")
    pid = os.fork()
    if not pid:
        own_progress().note(Phase.FORWARD)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
