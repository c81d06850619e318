"""Ranks of an elastic job that are told to stop save in one step and leave, whoever was lost or has joined by then."""

import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.errors import PeerLost, UsageError
from paceline.launch.job import ElasticTerms
from tests.elastic_job import run_elastic
from tests.pool import Pool
from tests.procs.test_elastic import until

STEPS = 6
THREE = ElasticTerms(minimum=1, maximum=3)


@dataclass(frozen=True)
class Plan:
    """What members do when they come to a place: kill, break, term, usr1, or wait for one that is to join."""

    folder: str
    does: tuple[tuple[int, int, str, str], ...]  # member, step, where, what
    declares: bool = True
    late: int = -1  # this member starts when another has come to wait for it


def train(member: int, plan: Plan) -> dict[str, Any]:
    """A loop as docs/elastic.md has it. Returns where this rank stood when it left."""
    logging.getLogger("paceline").setLevel(logging.ERROR)
    done: list[tuple[int, int, str, str]] = []
    file = Path(plan.folder, "waits")
    paceline.init(device="cpu")
    if member == plan.late:
        until(file.exists)

    def at(where: str) -> None:
        for one in plan.does:
            if one not in done and one[:3] == (member, run.step, where):
                done.append(one)
                act(one[3])

    def act(what: str) -> None:
        if what == "wait":
            file.touch()
            until(lambda: run._generations is not None and run._generations.wants_regroup)
        elif what == "break":
            raise PeerLost("as a connection breaks")
        else:
            numbers = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "usr1": signal.SIGUSR1}
            os.kill(os.getpid(), numbers[what])

    torch.manual_seed(0)
    model = paceline.DistributedDataParallel(torch.nn.Linear(4, 4), lanes=6, seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    checkpoints = paceline.Checkpointer(Path(plan.folder, "saved"), asynchronous=False)
    made = 0
    with paceline.Preemption() as preemption:
        run = paceline.Elastic(
            model=model,
            optimizer=optimizer,
            checkpoints=checkpoints,
            preemption=preemption if plan.declares else None,
        )
        while run.step < STEPS and not preemption.agreed():
            with run.attempt():
                at("before")
                for x in model.lanes([torch.ones(2, 4)] * len(model.own_lanes), run.step):
                    at("forward")
                    model(x).sum().backward()
                with run.commit():
                    optimizer.step()
                optimizer.zero_grad()
                made += 1
            at("between")
        saved = False
        while preemption.agreed() and not saved:
            with run.attempt():
                at("saving")
                checkpoints.save(run.step, **run.declared)
                saved = True
        run.finish()
        paceline.shutdown()
        return {"step": run.step, "saved": saved, "made": made, "asked": preemption.asked}


def left(procs: Pool, folder: Path, plan: Plan, processes: int = 3) -> list[dict[str, Any]]:
    """What the ranks have returned that came to their end. All of them left at one step, and it is saved."""
    job = run_elastic(procs, folder, train, plan, terms=THREE, processes=processes)
    job.check()
    (step,) = {value["step"] for value in job.values}
    assert all(value["saved"] for value in job.values)
    assert [path.name for path in Path(plan.folder, "saved").glob("step-*")] == [f"step-{step:08d}"]
    return job.values


@pytest.mark.parametrize("what", ["term", "usr1"])
def test_a_signal_that_comes_in_a_step_stops_all_ranks_after_it(procs: Pool, tmp_path: Path, what: str) -> None:
    values = left(procs, tmp_path, Plan(str(tmp_path), ((1, 2, "forward", what),)))
    assert [value["step"] for value in values] == [3, 3, 3]
    assert [value["asked"] for value in values] == [False, True, False]


def test_one_that_comes_after_ranks_were_lost_stops_those_that_are_left(procs: Pool, tmp_path: Path) -> None:
    """Long after the first steps: a clock would have them ask now and then, each survivor by its own count."""
    does = ((0, 1, "forward", "kill"), (2, 3, "between", "term"))
    values = left(procs, tmp_path, Plan(str(tmp_path), does))
    assert [value["step"] for value in values] == [4, 4]


def test_survivors_of_a_rank_that_is_lost_meanwhile_agree_when_they_meet(procs: Pool, tmp_path: Path) -> None:
    does = ((1, 2, "before", "term"), (0, 2, "forward", "kill"))
    values = left(procs, tmp_path, Plan(str(tmp_path), does))
    assert [value["step"] for value in values] == [2, 2]


def test_one_that_is_left_alone_stops(procs: Pool, tmp_path: Path) -> None:
    does = ((0, 1, "forward", "kill"), (1, 1, "forward", "kill"), (2, 3, "forward", "term"))
    (value,) = left(procs, tmp_path, Plan(str(tmp_path), does))
    assert value["step"] == 4


def test_one_that_joins_when_all_have_agreed_does_not_train(procs: Pool, tmp_path: Path) -> None:
    """They save; the generation breaks, and the next has a member that has heard nothing."""
    does = (
        (1, 1, "forward", "kill"),
        (0, 2, "forward", "usr1"),
        (0, 3, "saving", "wait"),
        (0, 3, "saving", "break"),
    )
    values = left(procs, tmp_path, Plan(str(tmp_path), does, late=3), processes=4)
    assert [(value["step"], value["made"]) for value in values] == [(3, 3), (3, 3), (3, 0)]


def test_one_that_was_not_declared_is_refused_by_name(procs: Pool, tmp_path: Path) -> None:
    terms = ElasticTerms(minimum=1, maximum=1)
    job = run_elastic(procs, tmp_path, train, Plan(str(tmp_path), (), declares=False), terms=terms, processes=1)
    with pytest.raises(UsageError, match=r"this Preemption was not declared.*Elastic\(model=model, preemption="):
        job.check()


def test_two_have_one_vote_too_few(procs: Pool, tmp_path: Path) -> None:
    terms = ElasticTerms(minimum=1, maximum=1)
    job = run_elastic(procs, tmp_path, declare_two, terms=terms, processes=1)
    with pytest.raises(UsageError, match="stops= and saves= were each given a Preemption"):
        job.check()


def declare_two(member: int) -> None:
    paceline.init(device="cpu")
    model = paceline.DistributedDataParallel(torch.nn.Linear(4, 4))
    with paceline.Preemption([signal.SIGTERM]) as stops, paceline.Preemption([signal.SIGUSR1]) as saves:
        paceline.Elastic(model=model, stops=stops, saves=saves)
