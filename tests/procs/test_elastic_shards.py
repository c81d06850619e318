"""Ranks die that have the state in shards, and the result is that of a run in which nothing happened, bit for bit."""

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
from paceline.elastic import joining
from paceline.launch.job import ElasticTerms
from tests.elastic_job import Job, run_elastic
from tests.models import draw
from tests.pool import Pool

STEPS, LANES, BATCH = 6, 12, 2


@dataclass(frozen=True)
class Fault:
    """What `member` does in `step`, and where."""

    member: int
    step: int
    where: str
    kind: str = "kill"

    def strike(self) -> None:
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise {"break": paceline.errors.PeerLost, "fail": ValueError}[self.kind]("as a connection breaks")


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        return draw(index, 8)


class Layer(nn.Module):
    """Large enough to be cut, with a hook in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 72)
        self.back = nn.Linear(72, 64)
        self.in_backward: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.wide(x).tanh()
        if hidden.requires_grad and self.in_backward is not None:
            hidden.register_hook(lambda _: self.in_backward())
        found: torch.Tensor = x + self.back(hidden)
        return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 64)
        self.norm = nn.BatchNorm1d(64)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.drop = nn.Dropout(0.2)
        self.outer = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.inner(x)))
        for layer in self.layers:
            hidden = layer(hidden)
        found: torch.Tensor = self.outer(hidden)
        return found


@dataclass(frozen=True)
class Script:
    """What a user may have written."""

    placement: str
    faults: tuple[Fault, ...] = ()
    shard: int | None = None
    copies: int | None = None
    transport: str = "auto"
    lanes: int | None = LANES
    saves: bool = False
    folder: str = ""
    late: int = -1  # from this member on, they start only when the others are at step 2; those wait for them at step 3
    full: int = 4  # ranks
    dtype: str = "float32"
    meta: bool = False
    device: str = "cpu"


def train(member: int, script: Script) -> dict[str, Any]:
    """Returns what the rank has at the end, and what it has been through."""
    logging.getLogger("paceline").setLevel(logging.ERROR)
    torch.manual_seed(member)  # rank by rank another start: the first decides
    struck: list[Fault] = []  # each of them once

    def at(where: str) -> None:
        for fault in script.faults:
            if fault not in struck and (member, run.step, where) == (fault.member, fault.step, fault.where):
                struck.append(fault)
                fault.strike()

    if any((fault.member, fault.where) == (member, "receiving") for fault in script.faults):
        setattr(joining, "receive", lambda *_: os.kill(os.getpid(), signal.SIGKILL))  # noqa: B010 (not for long)
    world = paceline.init(device=script.device)
    if 0 <= script.late <= member:
        until(Path(script.folder, "at 2").exists)
    kind = getattr(torch, script.dtype)
    with torch.device("meta" if script.meta else world.device):
        net = Net().to(kind)
    model = paceline.DistributedDataParallel(
        net,
        placement=script.placement,
        shard=script.shard,
        copies=script.copies,
        lanes=script.lanes,
        seed=5,
        transport=script.transport,
    )
    master = None if script.dtype == "float32" else torch.float32
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.05, foreach=False, master=master)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    loader: Any = paceline.Loader(Samples(), BATCH, lanes=script.lanes, seed=3)
    saves = paceline.Checkpointer(Path(script.folder, "saves"), asynchronous=False) if script.saves else None
    run = paceline.Elastic(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, checkpoints=saves)
    for layer in net.layers:
        setattr(layer, "in_backward", lambda: at("backward"))  # noqa: B010 (typed as any module)
    batches, worlds, steps = loader.endless(), [], []
    while run.step < STEPS:
        if script.late >= 0 and run.step == 2:
            Path(script.folder, "at 2").touch()
        if script.late >= 0 and run.step == 3 and world.size < script.full:
            until(lambda: run._generations is not None and run._generations.wants_regroup)
        with run.attempt():
            worlds.append((run.generation, world.rank, world.size))
            steps.append(run.step)
            found = next(batches)
            for microbatch in [found] if script.lanes is None else model.lanes(found, run.step):
                at("forward")
                output = model(microbatch.to(world.device, kind)).float()
                functional.mse_loss(output, torch.zeros_like(output)).backward()
            at("before clipping")  # which the others wait for, or half of them
            model.clip_grad_norm_(1.0)
            at("before the update")
            with run.commit():
                at("in the update")
                optimizer.step()
                at("after the update")
                scheduler.step()
            at("after the commit")
            optimizer.zero_grad()
            if saves is not None:
                saves.save(run.step, **run.declared)
    run.finish()
    digest = paceline.digest(model, optimizer, run.step, loader.state_dict())
    updates = paceline.digest(None, optimizer, run.step)  # without buffers
    paceline.shutdown()
    return {"digest": digest, "rate": scheduler.get_last_lr(), "worlds": worlds, "steps": steps, "updates": updates}


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def check(job: Job, quiet: str, lost: int) -> None:
    job.check()
    assert {value["digest"] for value in job.values} == {quiet}
    assert len(job.losses) == lost
    assert not job.gave_up


@pytest.fixture(scope="module")
def quiet(procs: Pool) -> Callable[..., str]:
    """The digest of a run in which nothing happens: the same in every world and under every placement."""
    found: dict[Any, str] = {}

    def of(**options: Any) -> str:
        key = tuple(options.items())
        if key not in found:
            found[key] = procs(1).run(alone, options, group=False)[0]
        return found[key]

    return of


def alone(rank: int, size: int, options: dict[str, Any]) -> str:
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    return str(train(0, Script("ddp", **options))["digest"])


META = {"meta": True}
ALWAYS_FOUR = ElasticTerms(minimum=4, maximum=4)
SOME = ("forward", "in the update", "after the commit")
OTHERS = ("backward", "before clipping", "after the update")


@pytest.mark.parametrize(
    ("placement", "transport", "wheres"),
    [
        ("zero1", "auto", SOME),
        ("zero1", "torch", OTHERS),
        ("zero2", "auto", OTHERS),
        ("zero2", "torch", SOME),
        ("zero3", "auto", SOME),
        ("zero3", "torch", OTHERS),
    ],
)
def test_the_shard_of_a_rank_that_is_killed_comes_from_its_twin(
    procs: Pool, tmp_path: Path, quiet: Any, placement: str, transport: str, wheres: tuple[str, ...]
) -> None:
    """Over torch's transport parameters of other ranks are still on their way after the update and the commit."""
    faults = tuple(Fault(member, step, where) for member, step, where in zip((3, 0, 4), (1, 2, 4), wheres, strict=True))
    script = Script(placement, faults, shard=2, transport=transport)
    job = run_elastic(procs, tmp_path, train, script, terms=ALWAYS_FOUR, processes=7)
    check(job, quiet(), lost=3)
    assert [formed.generation.size for formed in job.formed] == [4, 4, 4, 4]
    assert all(len(formed.generation.sources) == 2 for formed in job.formed[1:])


@pytest.mark.parametrize(("placement", "how"), [("zero1", {"shard": 2}), ("zero3", {"copies": 2})])
def test_the_world_shrinks_by_two_and_grows_back(
    procs: Pool, tmp_path: Path, quiet: Any, placement: str, how: dict[str, Any]
) -> None:
    """With copies= the cut becomes another one: over one rank, and over two again."""
    faults = (Fault(2, 1, "forward"), Fault(3, 1, "forward"))
    script = Script(placement, faults, **how, late=4, folder=str(tmp_path))
    terms = ElasticTerms(minimum=2, maximum=4)
    job = run_elastic(procs, tmp_path, train, script, terms=terms, processes=6)
    check(job, quiet(), lost=2)
    assert [formed.generation.size for formed in job.formed] == [4, 2, 4]


@pytest.mark.parametrize(
    ("placement", "options"), [("zero1", {"dtype": "bfloat16"}), ("zero3", {"dtype": "float32"}), ("zero3", META)]
)
def test_a_growing_world_cuts_its_state_anew(
    procs: Pool, tmp_path: Path, quiet: Any, placement: str, options: dict[str, Any]
) -> None:
    """No checkpoint is read: everything comes from those who have it. In bfloat16 there are masters."""
    script = Script(placement, transport="torch", late=2, folder=str(tmp_path), full=3, **options)
    terms = ElasticTerms(minimum=2, maximum=3, patience_s=0.1)
    job = run_elastic(procs, tmp_path, train, script, terms=terms, processes=3)
    check(job, quiet(**options), lost=0)
    assert [(formed.generation.size, len(formed.generation.sources)) for formed in job.formed] == [(2, 1), (3, 2)]


@pytest.mark.parametrize("placement", ["zero1", "zero3"])
def test_a_shard_that_is_lost_comes_from_the_checkpoint(
    procs: Pool, tmp_path: Path, quiet: Any, placement: str
) -> None:
    """First the world is smaller than the one that saved, then as large again."""
    script = Script(placement, (Fault(1, 1, "backward"),), saves=True, late=2, folder=str(tmp_path), full=2)
    terms = ElasticTerms(minimum=1, maximum=2)
    job = run_elastic(procs, tmp_path, train, script, terms=terms, processes=3)
    check(job, quiet(), lost=1)
    assert job.formed[1].generation.sources == ()
    assert [formed.generation.size for formed in job.formed] == [2, 1, 2]
    (tmp_path / "again").mkdir()
    again = Script(placement, saves=True, folder=str(tmp_path))
    job = run_elastic(procs, tmp_path / "again", train, again, terms=ElasticTerms(minimum=1, maximum=1), processes=1)
    check(job, quiet(), lost=0)  # the job as a whole goes on from there, on any number of ranks
    assert job.values[0]["steps"] == []


def test_a_rank_that_dies_while_it_is_given_its_shard_takes_nothing_with_it(
    procs: Pool, tmp_path: Path, quiet: Any
) -> None:
    """The others have their shards of the cut before until all have come that the new one needs."""
    script = Script("zero1", (Fault(2, 3, "receiving"),), late=2, folder=str(tmp_path), full=3)
    terms = ElasticTerms(minimum=2, maximum=3, patience_s=0.1)
    job = run_elastic(procs, tmp_path, train, script, terms=terms, processes=4)
    check(job, quiet(), lost=1)
    assert {formed.generation.size for formed in job.formed} == {2, 3}
    assert all(formed.generation.sources for formed in job.formed)


def test_all_twins_of_a_shard_are_lost_and_there_is_no_checkpoint(procs: Pool, tmp_path: Path) -> None:
    faults = (Fault(1, 2, "forward"), Fault(3, 2, "forward"))
    script = Script("zero2", faults, shard=2)
    job = run_elastic(procs, tmp_path, train, script, terms=ElasticTerms(minimum=2, maximum=4), processes=4)
    with pytest.raises(paceline.errors.WorldNotFormed, match=r"no remaining rank holds one of its shards"):
        job.check()


def test_a_connection_breaks(procs: Pool, tmp_path: Path, quiet: Any) -> None:
    """Nobody dies: all meet again, from both sides of an update and from the middle of it."""
    faults = (Fault(0, 2, "before the update", "break"), Fault(1, 2, "in the update", "break"))
    job = run_elastic(procs, tmp_path, train, Script("zero1", faults, shard=2), terms=ALWAYS_FOUR, processes=4)
    check(job, quiet(), lost=0)
    healed = job.formed[-1].generation
    assert (healed.sources, healed.step) == ((2, 3), 3)


def test_parameters_that_were_on_their_way_are_gathered_again(procs: Pool, tmp_path: Path, quiet: Any) -> None:
    """All have committed the step, and nobody has the parameters that others have updated in it."""
    script = Script("zero1", (Fault(0, 3, "after the commit", "break"),), transport="torch")
    terms = ElasticTerms(minimum=2, maximum=2)
    job = run_elastic(procs, tmp_path, train, script, terms=terms, processes=2)
    check(job, quiet(), lost=0)
    assert [(formed.generation.sources, formed.generation.step) for formed in job.formed] == [((0,), 0), ((0, 1), 3)]


def test_an_error_in_a_backward_ends_the_rank_that_has_it_alone(procs: Pool, tmp_path: Path, quiet: Any) -> None:
    """The other waits in a gather that does not come. Each of two ranks has the only shard that there is."""
    script = Script("zero3", (Fault(1, 2, "backward", "fail"),), copies=2, transport="torch")
    terms = ElasticTerms(minimum=2, maximum=2)
    job = run_elastic(procs, tmp_path, train, script, terms=terms, processes=3)
    assert [type(outcome.error) for outcome in job.outcomes] == [type(None), ValueError, type(None)]
    assert {value["digest"] for value in job.values} == {quiet()}


def test_masters_of_whole_parameters_outlive_the_rest(procs: Pool, tmp_path: Path, quiet: Any) -> None:
    script = Script("ddp", (Fault(0, 1, "backward"),), dtype="bfloat16", late=2, folder=str(tmp_path), full=2)
    job = run_elastic(procs, tmp_path, train, script, terms=ElasticTerms(minimum=1, maximum=2), processes=3)
    check(job, quiet(dtype="bfloat16"), lost=1)
    assert [formed.generation.size for formed in job.formed] == [2, 1, 2]


def test_without_lanes_twins_are_reduced_over_torch(procs: Pool, tmp_path: Path) -> None:
    """The bits may differ from those of a quiet run, and not from rank to rank."""
    script = Script("zero2", (Fault(2, 2, "backward"),), shard=2, lanes=None, transport="torch")
    job = run_elastic(procs, tmp_path, train, script, terms=ALWAYS_FOUR, processes=5)
    job.check()
    assert len(job.values) == 4
    assert len({value["updates"] for value in job.values}) == 1


def test_what_must_be_cut_alike(procs: Pool, tmp_path: Path) -> None:
    job = run_elastic(procs, tmp_path, wrap_two, terms=ElasticTerms(minimum=1, maximum=1), processes=1)
    with pytest.raises(paceline.errors.UsageError, match=r"shard=2, copies=None and with shard=4, copies=None"):
        job.check()


def wrap_two(member: int) -> None:
    paceline.init(device="cpu")
    models = [paceline.DistributedDataParallel(Net(), placement="zero1", shard=shard) for shard in (2, 4)]
    paceline.Elastic(model=models[0], critic=models[1])
