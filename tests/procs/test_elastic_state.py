"""What a script has beside its model and optimizer, when ranks of an elastic job are lost and others join."""

import logging
import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paceline
from paceline.errors import UsageError
from paceline.launch.job import ElasticTerms
from tests.elastic_job import run_elastic
from tests.pool import Pool
from tests.procs.test_elastic import until

STEPS, SAMPLES = 6, 36
TWO, THREE = ElasticTerms(minimum=1, maximum=2), ElasticTerms(minimum=1, maximum=3)


class Numbers(torch.utils.data.Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.randn(4, generator=torch.Generator().manual_seed(index))


@dataclass(frozen=True)
class Plan:
    """What the script trains with, and what happens: `kill` is a member, a step and a place."""

    folder: str = ""
    kill: tuple[int, int, str] = (-1, 0, "")
    joins: int = -1  # at this step the others wait for one that joins, and that has not started before
    lanes: int | None = 6
    stranger: bool = False  # a second model, that nobody has declared
    samples: str = "loader"


def batches_of(deals: Any) -> Any:
    """Begun anew in each generation, as a DataLoader has to be."""
    if isinstance(deals, paceline.Loader):
        return deals.endless()
    return iter(torch.utils.data.DataLoader(Numbers(), 2, sampler=deals))


def train(member: int, plan: Plan) -> dict[str, Any]:
    """Returns what this rank has at the end."""
    logging.getLogger("paceline").setLevel(logging.ERROR)
    world = paceline.init(device="cpu")
    torch.manual_seed(member)
    waits = Path(plan.folder, "waits")
    if plan.joins >= 0 and member > 2:
        until(waits.exists)

    def at(where: str) -> None:
        if (member, run.step, where) == plan.kill:
            os.kill(os.getpid(), signal.SIGKILL)

    net = torch.nn.Linear(4, 2)
    model = paceline.DistributedDataParallel(net, lanes=plan.lanes, seed=5)
    other = paceline.DistributedDataParallel(torch.nn.Linear(2, 2), lanes=plan.lanes, seed=5) if plan.stranger else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    # It grows in every second step, and a step in between is one that it has skipped.
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    log = Path(plan.folder, "log") if plan.samples == "log" else None
    deals: Any = paceline.Loader(Numbers(), 1, lanes=plan.lanes, seed=3, sample_log=log)
    if plan.samples == "sampler":
        deals = paceline.DistributedSampler(Numbers(), seed=3)
    run = paceline.Elastic(model=model, optimizer=optimizer, average=average, scaler=scaler, deals=deals)
    batches: Any = None
    generation, used, before = None, [], scaler.get_scale()
    while run.step < STEPS:
        if run.step == plan.joins and world.size < 3:
            waits.touch()
            until(lambda: run._generations is not None and run._generations.wants_regroup)
        with run.attempt():
            if generation != run.generation:
                generation, before = run.generation, scaler.get_scale()
                batches = batches_of(deals)
            found = next(batches)
            mine = [found[0].tolist()] if plan.lanes is None else [indices.tolist() for indices, _ in found]
            for _, x in [found] if plan.lanes is None else model.lanes(found, run.step):
                at("forward")
                y = model(x)
                scaler.scale((y if other is None else other(y)).square().mean()).backward()
            with run.commit():
                scaler.step(optimizer)
                scaler.update()
                average.update_parameters(net)
                if plan.samples == "sampler":
                    deals.commit(2)
                used.append((run.step, [index for one in mine for index in one]))
                at("in the update")
            optimizer.zero_grad()
    run.finish()
    deals.close() if plan.samples != "sampler" else None
    paceline.shutdown()
    state = {"scaler": scaler.state_dict(), "deals": deals.state_dict()}
    digest = paceline.digest(model, optimizer, run.step, state), paceline.digest(average, None, 0)
    return {"digest": digest, "scale_at_entry": before, "scale": scaler.get_scale(), "used": used}


def test_averages_and_a_scaler_are_healed_to_a_rank_that_joins(procs: Pool, tmp_path: Path) -> None:
    (quiet,) = {
        value["digest"]
        for value in run_elastic(procs, folder(tmp_path, "quiet"), train, Plan(), terms=THREE, processes=3).values
    }
    plan = Plan(folder=str(tmp_path), kill=(1, 1, "forward"), joins=4)
    job = run_elastic(procs, folder(tmp_path, "job"), train, plan, terms=THREE, processes=4)
    job.check()
    assert {value["digest"] for value in job.values} == {quiet}
    assert [formed.generation.members for formed in job.formed] == [(0, 1, 2), (0, 2), (0, 2, 3)]
    assert job.values[-1]["scale_at_entry"] == 4096.0 and job.values[-1]["scale"] == 8192.0
    assert [step for step, _ in job.values[-1]["used"]] == [5]


def folder(path: Path, name: str) -> Path:
    (path / name).mkdir()
    return path / name


def test_a_replica_that_was_not_declared_is_refused_by_name(procs: Pool, tmp_path: Path) -> None:
    job = run_elastic(procs, tmp_path, train, Plan(stranger=True, lanes=None), terms=TWO, processes=2)
    for outcome in job.outcomes:
        assert isinstance(outcome.error, UsageError)
        assert "a replica that was not declared to paceline.Elastic is being trained (Linear)" in str(outcome.error)
        assert "declare it, as in Elastic(model=model, critic=critic, ...)" in str(outcome.error)


def test_fewer_lanes_than_ranks_are_refused_before_anything_is_formed(procs: Pool, tmp_path: Path) -> None:
    job = run_elastic(procs, tmp_path, train, Plan(lanes=2), terms=THREE, processes=3)
    errors = {str(outcome.error) for outcome in job.outcomes}
    assert job.formed == []
    (error,) = errors
    assert "lanes=2, but this job may grow to 3 ranks" in error and "expected at least 3 lanes" in error


def test_a_sampler_deals_what_was_not_committed_to_those_that_are_left(procs: Pool, tmp_path: Path) -> None:
    """36 samples: two steps of three ranks with two each, and then four of the two that are left."""
    plan = Plan(lanes=None, samples="sampler", kill=(1, 2, "forward"))
    job = run_elastic(procs, tmp_path, train, plan, terms=THREE, processes=3)
    job.check()
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3)).tolist()
    first, last = (dict(value["used"]) for value in job.values)
    dealt = [index for step in range(2, STEPS) for index in (*first[step], *last[step])]
    assert sorted(dealt) == sorted(order[12:28])
    assert {index for step in (0, 1) for index in (*first[step], *last[step])} <= set(order[:12])


@pytest.mark.parametrize("where", ["forward", "in the update"])
def test_no_sample_is_skipped_or_repeated_when_a_rank_is_killed(procs: Pool, tmp_path: Path, where: str) -> None:
    plan = Plan(folder=str(tmp_path), samples="log", kill=(1, 3, where))
    job = run_elastic(procs, tmp_path, train, plan, terms=THREE, processes=3)
    job.check()
    report = paceline.data.read_sample_log(tmp_path / "log")
    assert report.problems() == []
    taken: Counter[int] = Counter(len(entry.ids) for entry in report.entries)
    assert sum(size * count for size, count in taken.items()) == STEPS * 6
    assert [session.world_size for session in report.sessions] == [3, 2]
    assert len(report.counts(0)) == SAMPLES and set(report.counts(0).values()) == {1}
