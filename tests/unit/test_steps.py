"""Collectives in a row as one work: started in turn, waited for together, and failing as one."""

import copy
import gc
import pickle

import pytest
import torch

from paceline.collectives.protocols import Work
from paceline.strategies.memory import ParamMemory, clear_unless_finite
from paceline.strategies.multi_step import SteppedWork, Steps


class Fake:
    """A collective that is complete when the test says so."""

    def __init__(self, *, complete: bool = False, error: Exception | None = None) -> None:
        self.complete = complete
        self.error = error
        self.waited: list[float] = []

    def done(self) -> bool:
        return self.complete

    def wait(self, seconds: float) -> bool:
        self.waited.append(seconds)
        if self.error is not None:
            raise self.error
        return self.complete


def steps_of(works: list[Fake], log: list[str]) -> Steps:
    for number, work in enumerate(works):
        log.append(f"start {number}")
        yield work
        log.append(f"end {number}")


def test_a_step_begins_when_the_one_before_is_complete() -> None:
    works, log = [Fake(), Fake()], list[str]()
    work: Work = SteppedWork(steps_of(works, log))
    assert log == ["start 0"], "the first collective is started at once"
    assert not work.done()
    works[0].complete = True
    assert log == ["start 0"], "nothing runs by itself"
    assert not work.done()
    assert log == ["start 0", "end 0", "start 1"]
    assert works[0].waited == [0.0], "a result may be read only after wait"
    works[1].complete = True
    assert work.done() and work.done()
    assert log[-1] == "end 1"
    assert work.wait(1.0)


def test_a_wait_goes_through_all_steps_and_ends_at_its_deadline() -> None:
    works, log = [Fake(complete=True), Fake()], list[str]()
    work = SteppedWork(steps_of(works, log))
    assert not work.wait(0.5)
    assert log[-1] == "start 1"
    assert all(0 < seconds <= 0.5 for fake in works for seconds in fake.waited)
    works[1].complete = True
    assert work.wait(0.0)
    assert log[-1] == "end 1"


def test_no_steps_are_complete() -> None:
    work = SteppedWork(steps_of([], []))
    assert work.done() and work.wait(0.0)


def test_a_collective_that_fails_fails_the_work() -> None:
    failing = Fake(complete=True, error=RuntimeError("lost"))
    work = SteppedWork(steps_of([failing, Fake()], []))
    assert work.done(), "complete, though not well"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            work.wait(1.0)


def test_a_wait_that_is_interrupted_can_go_on() -> None:
    first = Fake(error=RuntimeError("a slice"))
    work = SteppedWork(steps_of([first], []))
    with pytest.raises(RuntimeError, match="a slice"):
        work.wait(1.0)
    first.error, first.complete = None, True
    assert work.wait(1.0)


@pytest.mark.parametrize("by", ["done", "wait"])
def test_a_step_that_fails_does_not_pass_for_complete(by: str) -> None:
    def broken() -> Steps:
        yield Fake(complete=True)
        raise ValueError("in between")

    work = SteppedWork(broken())
    if by == "done":
        assert work.done()
    for _ in range(2):
        with pytest.raises(ValueError, match="in between"):
            work.wait(1.0)


def test_a_step_that_is_interrupted_does_not_pass_for_complete() -> None:
    def interrupted() -> Steps:
        yield Fake(complete=True)
        raise KeyboardInterrupt

    work = SteppedWork(interrupted())
    with pytest.raises(KeyboardInterrupt):
        work.done()
    with pytest.raises(KeyboardInterrupt):
        work.wait(1.0)


def test_steps_build_no_graph() -> None:
    weight = torch.ones(2, requires_grad=True)
    seen = []

    def multiplying() -> Steps:
        yield Fake(complete=True)
        seen.append((weight * 2).requires_grad)

    assert SteppedWork(multiplying()).wait(1.0)
    assert seen == [False]


# ---- what is remembered


def test_memory_is_kept_by_parameter_and_goes_with_it() -> None:
    memory: ParamMemory[list[int]] = ParamMemory()
    first, second = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    memory.of(first, list).append(1)
    assert memory.of(first, list) == [1]
    assert memory.get(second) is None
    assert memory.of(second, list) == []
    assert len(memory) == 2
    del first
    gc.collect()
    assert len(memory) == 1
    memory.clear()
    assert memory.get(second) is None


def test_a_copy_begins_empty() -> None:
    memory: ParamMemory[int] = ParamMemory()
    param = torch.nn.Parameter(torch.ones(1))
    memory.of(param, lambda: 1)
    assert len(copy.deepcopy(memory)) == len(pickle.loads(pickle.dumps(memory))) == 0


@pytest.mark.parametrize(("witness", "left"), [(1.0, 1.0), (float("nan"), 0.0), (float("inf"), 0.0)])
def test_what_is_not_finite_is_forgotten(witness: float, left: float) -> None:
    tensor = torch.ones(3)
    clear_unless_finite(torch.tensor(witness), tensor)
    assert torch.equal(tensor, torch.full((3,), left))
