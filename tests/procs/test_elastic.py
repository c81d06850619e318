"""Ranks die in the middle of training, and the result is that of a run in which nothing happened, bit for bit."""

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import paceline
from paceline.launch.job import ElasticTerms
from tests.elastic_job import Job, run_elastic
from tests.models import draw
from tests.pool import Pool

STEPS, LANES, BATCH = 6, 6, 2
COMPARES = paceline.Agreement(state_every=1)
THREE = ElasticTerms(minimum=1, maximum=3)


@dataclass(frozen=True)
class Fault:
    """What `member` does in `step`, and where."""

    member: int
    step: int
    where: str
    kind: str = "kill"

    def strike(self, net: "Seen") -> None:
        if self.kind == "compute wrong":
            net.last.weight.register_hook(lambda grad: grad * 1.0001)
            return
        if self.kind == "flip":
            with torch.no_grad():
                net.last.bias.view(torch.int32)[1] ^= 1 << 20
            return
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        kinds = {"break": paceline.errors.PeerLost, "fail": ValueError, "damage": paceline.errors.MessageDamaged}
        raise kinds[self.kind]("as a connection breaks")


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return draw(index, 8)


class Seen(nn.Module):
    """Has a hook in the middle of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(16, 4)
        self.in_backward: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.first(x)).relu())
        if hidden.requires_grad and self.in_backward is not None:
            hidden.register_hook(lambda _: self.in_backward())
        found: torch.Tensor = self.last(hidden)
        return found


@dataclass(frozen=True)
class Script:
    """What a user may have written."""

    faults: tuple[Fault, ...] = ()
    transport: str = "auto"
    lanes: int | None = LANES
    folder: str = ""  # of checkpoints, one after every step
    late: int = -1  # a member that starts only when the others are at step 3; they wait for it at step 4
    goes_on: bool = False  # after an error of its own
    device: str = "cpu"
    agreement: paceline.Agreement | None = None


def train(member: int, script: Script) -> dict[str, Any]:
    """Returns what the rank has at the end, and what it has been through."""
    logging.getLogger("paceline").setLevel(logging.ERROR)
    struck: list[Fault] = []  # each of them once
    torch.manual_seed(member)  # rank by rank another start: the first decides

    def at(where: str) -> None:
        for fault in script.faults:
            if fault not in struck and (member, run.step, where) == (fault.member, fault.step, fault.where):
                struck.append(fault)
                fault.strike(net)

    world = paceline.init(device=script.device)
    if member == script.late:
        await_file(Path(script.folder, "at 3"))
    net = Seen().to(world.device)
    model = paceline.DistributedDataParallel(
        net, lanes=script.lanes, seed=5, transport=script.transport, agreement=script.agreement
    )
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params[:3], lr=0.05, foreach=False)
    second = torch.optim.SGD(params[3:], lr=0.05, momentum=0.9, foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader: Any = paceline.Loader(Samples(), BATCH, lanes=script.lanes, seed=3)
    saves = paceline.Checkpointer(script.folder, asynchronous=False) if script.folder else None
    run = paceline.Elastic(
        model=model, optimizer=optimizer, second=second, scheduler=scheduler, loader=loader, checkpoints=saves
    )
    net.in_backward = lambda: at("backward")
    batches, worlds, steps = loader.endless(), [], []
    while run.step < STEPS:
        at("between")
        if script.late >= 0 and run.step == 3:
            Path(script.folder, "at 3").touch()
        if script.late >= 0 and run.step == 4 and world.size < 3:
            until(lambda: run._generations is not None and run._generations.wants_regroup)
        try:
            with run.attempt():
                worlds.append((run.generation, world.rank, world.size))
                steps.append(run.step)
                at(f"reading in generation {run.generation}")
                found = next(batches)
                for microbatch in [found] if script.lanes is None else model.lanes(found, run.step):
                    at("forward")
                    output = model(microbatch.to(world.device))
                    loss = functional.mse_loss(output, torch.zeros_like(output))
                    loss.backward()
                at("before the update")
                with run.commit():
                    optimizer.step()
                    at("in the update")
                    second.step()
                    scheduler.step()
                    at("after the update")
                at("after the commit")
                optimizer.zero_grad()
                second.zero_grad()
                if saves is not None:
                    saves.save(run.step, **run.declared)
        except ValueError:
            if not script.goes_on:
                raise
    run.finish()
    paceline.shutdown()
    more = {"loader": loader.state_dict(), "second": second.state_dict()}
    return {
        "digest": paceline.digest(model, optimizer, run.step, more),
        "rate": scheduler.get_last_lr(),
        "worlds": worlds,
        "steps": steps,
        "stamped": {stamp.generation for stamp in model.trace.stamps()},
    }


def await_file(path: Path) -> None:
    until(path.exists)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture(scope="module")
def quiet(procs: Pool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run in which nothing happens."""
    job = run_elastic(procs, tmp_path_factory.mktemp("quiet"), train, Script(), terms=THREE, processes=3)
    job.check()
    (digest,) = {value["digest"] for value in job.values}
    assert len(job.values) == 3
    assert [len(formed.generation.members) for formed in job.formed] == [3]
    return str(digest)


def check(job: Job, quiet: str, lost: int) -> None:
    job.check()
    assert {value["digest"] for value in job.values} == {quiet}
    assert len(job.losses) == lost
    assert not job.gave_up
    for value in job.values:
        numbers = [number for number, _, _ in value["worlds"]]  # an attempt may end before its first stamp
        assert value["stamped"] <= set(numbers) and numbers[-1] in value["stamped"], "also on ranks that came later"


def test_the_quiet_run_is_that_of_one_process(procs: Pool, quiet: str) -> None:
    (alone,) = procs(1).run(alone_, group=False)
    assert alone["digest"] == quiet
    assert alone["worlds"] == [(-1, 0, 1)] * STEPS


def alone_(rank: int, size: int) -> dict[str, Any]:
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    return train(0, Script())


KILLS = ("between", "forward", "backward", "before the update", "in the update", "after the update", "after the commit")


@pytest.mark.parametrize("where", KILLS)
@pytest.mark.parametrize("member", [0, 2])
def test_a_rank_is_killed(procs: Pool, tmp_path: Path, quiet: str, member: int, where: str) -> None:
    script = Script((Fault(member, 2, where),))
    job = run_elastic(procs, tmp_path, train, script, terms=THREE, processes=3)
    check(job, quiet, lost=1)
    assert len(job.values) == 2


@pytest.mark.parametrize("transport", ["torch"])
def test_over_other_transports(procs: Pool, tmp_path: Path, quiet: str, transport: str) -> None:
    script = Script((Fault(1, 2, "forward"), Fault(2, 4, "backward")), transport=transport)
    job = run_elastic(procs, tmp_path, train, script, terms=THREE, processes=3)
    check(job, quiet, lost=2)
    assert [formed.generation.size for formed in job.formed] == [3, 2, 1]


def test_a_connection_breaks(procs: Pool, tmp_path: Path, quiet: str) -> None:
    """Nobody dies: all meet again. Each is at another place of step 2: before its update, in it, and after it."""
    faults = (Fault(0, 2, "before the update", "break"), Fault(1, 2, "in the update", "break"))
    job = run_elastic(procs, tmp_path, train, Script(faults), terms=THREE, processes=3)
    check(job, quiet, lost=0)
    assert [formed.generation.size for formed in job.formed] == [3, 3]
    healed = job.formed[-1].generation
    assert (healed.sources, healed.step) == ((2,), 3)
    assert [value["steps"] for value in job.values] == [[0, 1, 2, 3, 4, 5]] * 2 + [[0, 1, 2, 3, 3, 4, 5]]


def test_a_step_that_all_find_damaged_is_made_again(procs: Pool, tmp_path: Path, quiet: str) -> None:
    faults = tuple(Fault(member, 2, "before the update", "damage") for member in range(3))
    job = run_elastic(procs, tmp_path, train, Script(faults), terms=THREE, processes=3)
    check(job, quiet, lost=0)
    assert [(formed.generation.size, formed.generation.step) for formed in job.formed] == [(3, 0), (3, 2)]
    assert {tuple(value["steps"]) for value in job.values} == {(0, 1, 2, 2, 3, 4, 5)}


def test_a_step_that_all_find_damaged_twice_is_not_made_again(procs: Pool, tmp_path: Path) -> None:
    wheres = ("forward", "before the update")
    faults = tuple(Fault(member, 2, where, "damage") for member in range(3) for where in wheres)
    job = run_elastic(procs, tmp_path, train, Script(faults), terms=THREE, processes=3)
    assert job.gave_up.startswith("step 2 has failed in two generations, so it is not tried again")
    assert "a rank raised MessageDamaged: as a connection breaks" in job.gave_up
    assert {type(outcome.error) for outcome in job.outcomes} == {paceline.errors.WorldNotFormed}


def test_a_rank_that_computes_wrong_is_replaced(procs: Pool, tmp_path: Path, quiet: str) -> None:
    """Its lane is audited in step 2, which the others then make without it."""
    script = Script((Fault(1, 2, "between", "compute wrong"),), agreement=paceline.Agreement(audit_every=1))
    job = run_elastic(procs, tmp_path, train, script, terms=THREE, processes=3)
    errors = [outcome.error for outcome in job.outcomes]
    assert isinstance(errors[1], paceline.errors.WrongGradients)
    assert errors[1].step == 2
    assert [loss.member for loss in job.losses] == [1]
    assert job.losses[0].cause.startswith("raised WrongGradients: rank 1 computes wrong")
    assert {value["digest"] for value in job.values} == {quiet}
    assert {tuple(value["steps"]) for value in job.values} == {(0, 1, 2, 2, 3, 4, 5)}


def test_of_two_ranks_that_differ_it_is_not_known_who_is_wrong(procs: Pool, tmp_path: Path) -> None:
    script = Script((Fault(1, 2, "between", "compute wrong"),), agreement=paceline.Agreement(audit_every=1))
    job = run_elastic(procs, tmp_path, train, script, terms=ElasticTerms(minimum=1, maximum=2), processes=2)
    assert "a rank raised WrongGradients" in job.gave_up
    assert "it takes a third rank to say which" in job.gave_up


def test_a_rank_whose_state_has_drifted_is_replaced(procs: Pool, tmp_path: Path, quiet: str) -> None:
    """The others, who are the majority, make the step again without it."""
    script = Script((Fault(1, 2, "between", "flip"),), agreement=COMPARES)
    job = run_elastic(procs, tmp_path, train, script, terms=THREE, processes=3)
    errors = [outcome.error for outcome in job.outcomes]
    assert isinstance(errors[1], paceline.errors.ReplicaDrift)
    assert (errors[1].ranks, errors[1].known) == ((1,), True)
    assert [loss.member for loss in job.losses] == [1]
    assert job.losses[0].cause.startswith("raised ReplicaDrift: replicas have drifted apart")
    assert {value["digest"] for value in job.values} == {quiet}
    assert {tuple(value["steps"]) for value in job.values} == {(0, 1, 2, 2, 3, 4, 5)}


@pytest.mark.parametrize("found", ["in the next step", "by a save"])
def test_two_ranks_that_have_drifted_go_back_to_what_was_saved_before(
    procs: Pool, tmp_path: Path, quiet: str, found: str
) -> None:
    in_step = found == "in the next step"
    where = "between" if in_step else "after the commit"
    script = Script((Fault(1, 3, where, "flip"),), folder=str(tmp_path), agreement=COMPARES if in_step else None)
    job = run_elastic(procs, tmp_path, train, script, terms=ElasticTerms(minimum=2, maximum=2), processes=2)
    check(job, quiet, lost=0)
    assert [formed.generation.sources for formed in job.formed] == [(0,), ()]
    assert [ready.whole for ready in job.ready[2:]] == [False, False]
    steps = (0, 1, 2, 3, 3, 4, 5) if in_step else (0, 1, 2, 2, 3, 4, 5)
    assert {tuple(value["steps"]) for value in job.values} == {steps}


def test_a_rank_is_killed_while_others_wait_for_it_in_the_loader(procs: Pool, tmp_path: Path, quiet: str) -> None:
    """In a new generation loaders compare what they deal before the first batch."""
    faults = (Fault(0, 2, "forward", "break"), Fault(1, 2, "reading in generation 1"))
    job = run_elastic(procs, tmp_path, train, Script(faults), terms=THREE, processes=3)
    check(job, quiet, lost=1)


def test_all_are_torn(procs: Pool, tmp_path: Path, quiet: str) -> None:
    faults = tuple(Fault(member, 3, "in the update", "break") for member in range(3))
    script = Script(faults, folder=str(tmp_path))
    job = run_elastic(procs, tmp_path, train, script, terms=THREE, processes=3)
    check(job, quiet, lost=0)
    assert job.formed[-1].generation.sources == ()
    assert {tuple(value["steps"]) for value in job.values} == {(0, 1, 2, 3, 3, 4, 5)}


def test_without_a_checkpoint_all_torn_is_the_end(procs: Pool, tmp_path: Path) -> None:
    faults = tuple(Fault(member, 3, "in the update", "break") for member in range(2))
    job = run_elastic(procs, tmp_path, train, Script(faults), terms=ElasticTerms(minimum=2, maximum=2), processes=2)
    with pytest.raises(paceline.errors.WorldNotFormed, match="checkpoints=paceline.Checkpointer"):
        job.check()
    assert all("raised WorldNotFormed" in loss.cause for loss in job.losses)


def test_a_rank_that_is_new_takes_everything(procs: Pool, tmp_path: Path, quiet: str) -> None:
    """It starts when the others have gone on without it, and they leave their generation for it after a step."""
    script = Script((Fault(1, 1, "forward"),), folder=str(tmp_path), late=3)
    job = run_elastic(procs, tmp_path, train, script, terms=THREE, processes=4)
    check(job, quiet, lost=1)
    assert [formed.generation.members for formed in job.formed] == [(0, 1, 2), (0, 2), (0, 2, 3)]
    assert job.values[-1]["steps"] == [5]
    assert job.values[-1]["worlds"] == [(2, 2, 3)]


def test_a_spare_takes_the_place_of_a_rank(procs: Pool, tmp_path: Path, quiet: str) -> None:
    script = Script((Fault(1, 3, "backward"),))
    terms = ElasticTerms(minimum=2, maximum=2, spares=1)
    job = run_elastic(procs, tmp_path, train, script, terms=terms, processes=3)
    check(job, quiet, lost=1)
    assert [formed.generation.members for formed in job.formed] == [(0, 1), (0, 2)]


def test_an_error_of_the_script_is_raised_there_alone(procs: Pool, tmp_path: Path, quiet: str) -> None:
    script = Script((Fault(1, 2, "backward", "fail"),))
    job = run_elastic(procs, tmp_path, train, script, terms=THREE, processes=3)
    assert [type(outcome.error) for outcome in job.outcomes] == [type(None), ValueError, type(None)]
    assert [loss.cause for loss in job.losses] == ["raised ValueError: as a connection breaks"]
    assert {value["digest"] for value in job.values} == {quiet}


def test_a_script_may_catch_its_error_and_go_on(procs: Pool, tmp_path: Path, quiet: str) -> None:
    script = Script((Fault(1, 2, "backward", "fail"),), goes_on=True)
    job = run_elastic(procs, tmp_path, train, script, terms=THREE, processes=3)
    check(job, quiet, lost=1)  # it was told as lost before it came back
    assert job.values[1]["steps"] == [0, 1, 2, 2, 3, 4, 5]


def test_without_lanes(procs: Pool, tmp_path: Path) -> None:
    script = Script((Fault(1, 2, "forward"), Fault(0, 4, "after the update")), lanes=None)
    job = run_elastic(procs, tmp_path, train, script, terms=THREE, processes=3)
    job.check()
    (value,) = job.values
    assert sorted(set(value["steps"])) == list(range(STEPS))
    assert value["worlds"][-1] == (2, 0, 1)
