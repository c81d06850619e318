"""Ranks die in the middle of training, and the result is that of a run in which nothing happened, bit for bit."""

import logging
import os
import signal
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
FOUR = ElasticTerms(minimum=1, maximum=3)


@dataclass(frozen=True)
class Fault:
    """What `member` does in `step`, and where."""

    member: int
    step: int
    where: str
    kind: str = "kill"

    def strike(self, member: int, step: int, where: str) -> None:
        if (member, step, where) == (self.member, self.step, self.where):
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise paceline.errors.PeerLost("as a connection breaks")


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


class Halved(torch.optim.AdamW):
    """Stops in the middle of an update when it is told to."""

    stops: Any = None

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        self.param_groups = groups[:1]
        super().step()
        self.param_groups = groups
        if self.stops is not None:
            self.stops()
        self.param_groups = groups[1:]
        super().step()
        self.param_groups = groups


def train(member: int, faults: tuple[Fault, ...], transport: str = "auto", lanes: int | None = LANES) -> dict[str, Any]:
    """A script as a user writes it. Returns what the rank has at the end, and what it has been through."""
    logging.getLogger("paceline").setLevel(logging.ERROR)
    torch.manual_seed(member)  # rank by rank another start: the first decides

    def at(where: str) -> None:
        for fault in faults:
            fault.strike(member, run.step, where)

    paceline.init()
    net = Seen()
    model = paceline.DistributedDataParallel(net, lanes=lanes, seed=5, transport=transport)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": params[:3]}, {"params": params[3:]}], lr=0.05, foreach=False)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader: Any = paceline.Loader(Samples(), BATCH, lanes=lanes, seed=3)
    run = paceline.Elastic(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    net.in_backward = lambda: at("backward")
    batches, worlds, steps = loader.endless(), [], []
    while run.step < STEPS:
        at("between")
        with run.attempt():
            worlds.append((run.generation, paceline.get("rank"), paceline.get("ws")))
            steps.append(run.step)
            found = next(batches)
            for microbatch in found if lanes is None else model.lanes(found, run.step):
                at("forward")
                loss = functional.mse_loss(model(microbatch), torch.zeros(len(microbatch), 4))
                loss.backward()
            with run.commit():
                at("before the update")
                optimizer.step()
                at("after the update")
                scheduler.step()
            at("after the commit")
            optimizer.zero_grad()
    run.finish()
    paceline.shutdown()
    return {
        "digest": paceline.digest(model, optimizer, run.step, loader),
        "rate": scheduler.get_last_lr(),
        "worlds": worlds,
        "steps": steps,
    }


@pytest.fixture(scope="module")
def quiet(procs: Pool, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run in which nothing happens."""
    job = run_elastic(procs, tmp_path_factory.mktemp("quiet"), train, (), terms=FOUR, processes=3)
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


def test_the_quiet_run_is_that_of_one_process(procs: Pool, quiet: str) -> None:
    (alone,) = procs(1).run(alone_, group=False)
    assert alone["digest"] == quiet
    assert alone["worlds"] == [(-1, 0, 1)] * STEPS


def alone_(rank: int, size: int) -> dict[str, Any]:
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    return train(0, ())


@pytest.mark.parametrize("where", ["between", "forward", "backward", "before the update", "after the update"])
@pytest.mark.parametrize("member", [0, 2])
def test_a_rank_is_killed(procs: Pool, tmp_path: Path, quiet: str, member: int, where: str) -> None:
    job = run_elastic(procs, tmp_path, train, (Fault(member, 2, where),), terms=FOUR, processes=3)
    check(job, quiet, lost=1)
    assert len(job.values) == 2
