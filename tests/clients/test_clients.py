"""Other people's training loops, with our class in the place of torch's: they end with the same bits.

Clients are imported by the ranks alone, once, because that takes seconds.
"""

import gc
import importlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import paceline
from paceline.errors import NotWhole
from paceline.replica.live import all_replicas
from tests.clients.job import EPOCHS, STEPS, Client, Job, Trained, readme_block, sharded, small_model
from tests.pool import Pool

CLIENTS = ["accelerate_loop", "fabric_loop", "lightning_trainer", "transformers_trainer"]
JOBS = {
    "plain": Job(),
    "accumulated": Job(microbatches=2),
    "clipped": Job(clip=0.05),
    "bf16": Job(precision="bf16-mixed"),
    "all": Job(microbatches=2, clip=0.05, precision="bf16-mixed"),
}
CASES = {f"{client}-{name}": (client, job) for client in CLIENTS for name, job in JOBS.items()} | {
    "fabric_loop-bf16-true": ("fabric_loop", Job(precision="bf16-true")),
    "lightning_trainer-bf16-true": ("lightning_trainer", Job(precision="bf16-true")),
    "lightning_trainer-manual": ("lightning_trainer", Job(manual=True)),
    "transformers_trainer-recomputed": ("transformers_trainer", Job(recomputes=True)),
}
TRANSPORTS = ["shm", "torch"]
TORCHS = nn.parallel.DistributedDataParallel
OURS = paceline.DistributedDataParallel
DEADLINE_S = 90.0
pytestmark = pytest.mark.timeout(100)


def load(client: str) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["OMP_NUM_THREADS"] = "1"  # Accelerate sets it otherwise, with a warning
    return importlib.import_module(f"tests.clients.{client}")


def compare_closely(expected: Trained, found: Trained) -> None:
    """The same within rounding, but for what is nothing else: a bias before a BatchNorm has no effect."""
    torch.testing.assert_close(found.losses, expected.losses[-len(found.losses) :], rtol=1e-5, atol=1e-6)
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        if not name.endswith(("0.bias", "running_mean")):
            torch.testing.assert_close(found.weights[name], value, rtol=1e-4, atol=1e-6)


def compare(expected: Trained, found: Trained) -> None:
    assert found.losses == expected.losses[-len(found.losses) :]
    assert list(found.weights) == list(expected.weights)
    assert not [name for name, value in expected.weights.items() if not torch.equal(value, found.weights[name])]


def train_with_both(rank: int, size: int, client: str, job: Job, folder: Path) -> None:
    loop: Client = load(client)
    expected = loop.train(job, TORCHS, folder / "reference", None)
    assert len(set(expected.losses)) == EPOCHS * STEPS * job.microbatches
    assert all(loss > 0 for loss in expected.losses)
    for transport in TRANSPORTS:
        os.environ["PACELINE_TRANSPORT"] = transport
        compare(expected, loop.train(job, OURS, folder / transport, None))


@pytest.mark.parametrize(("client", "job"), CASES.values(), ids=CASES)
def test_a_client_ends_with_the_same_weights(procs: Pool, tmp_path: Path, client: str, job: Job) -> None:
    procs(2).run(train_with_both, client, job, tmp_path, deadline_s=DEADLINE_S)


def resume_with_both(rank: int, size: int, client: str, job: Job, folder: Path) -> None:
    loop: Client = load(client)
    expected = loop.train(job, TORCHS, folder / "reference", None)
    compare(expected, loop.train(job, OURS, folder / "ours", None))
    for saved, ddp in (("reference", OURS), ("ours", OURS), ("ours", TORCHS)):
        resumed = loop.train(job, ddp, folder / f"{saved}-{ddp.__module__}", loop.checkpoint(folder / saved))
        assert len(resumed.losses) == len(expected.losses) // 2
        compare(expected, resumed)


@pytest.mark.parametrize("job", [JOBS["plain"], JOBS["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_resumes_with_the_same_bits(procs: Pool, tmp_path: Path, client: str, job: Job) -> None:
    procs(2).run(resume_with_both, client, job, tmp_path, deadline_s=DEADLINE_S)


def train_in_shards(rank: int, size: int, client: str, placement: str, folder: Path) -> None:
    loop: Client = load(client)
    jobs = {"plain": Job(), "most": Job(2, precision="bf16-mixed"), "clipped": Job(clip=0.05)}
    special = {"transformers_trainer": Job(recomputes=True), "fabric_loop": Job(precision="bf16-true")}
    for name, job in {**jobs, "special": special.get(client, Job(manual=True))}.items():
        reference, ours = folder / name / "reference", folder / name / "ours"
        expected = loop.train(job, TORCHS, reference, None)
        same = compare_closely if job.clip else compare  # the norm adds in another order
        sharded = replace(job, placement=placement)
        same(expected, loop.train(sharded, OURS, ours, None))
        if name != "most":
            continue
        for saved, how, ddp in ((reference, sharded, OURS), (ours, sharded, OURS), (ours, job, TORCHS)):
            resumed = loop.train(how, ddp, folder / f"{saved.name}-{how.placement}", loop.checkpoint(saved))
            assert len(resumed.losses) == len(expected.losses) // 2
            same(expected, resumed)
    gc.collect()
    assert not all_replicas(), "kept alive by a trainer whose module has a reference to it"


@pytest.mark.parametrize("placement", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_trains_in_shards(procs: Pool, tmp_path: Path, client: str, placement: str) -> None:
    procs(2).run(train_in_shards, client, placement, tmp_path, deadline_s=DEADLINE_S)


def train_without_the_recipe(rank: int, size: int, client: str, folder: Path) -> None:
    loop: Any = load(client)
    placement = "zero2"
    if client == "lightning_trainer":  # the strategy, but not the clipping
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "readme_block", lambda word: {**readme_block(word), "Clips": type("Nothing", (), {})})
            loop.train(Job(clip=0.05, placement=placement), OURS, folder, None)
    else:
        loop.train(Job(), sharded(OURS, placement), folder, None)


@pytest.mark.parametrize("client", ["accelerate_loop", "lightning_trainer", "transformers_trainer"])
def test_a_client_that_does_not_know_of_shards_is_told(procs: Pool, tmp_path: Path, client: str) -> None:
    for outcome in procs(2).attempt(train_without_the_recipe, client, tmp_path, deadline_s=DEADLINE_S):
        assert isinstance(outcome.error, NotWhole)
        assert "model.clip_grad_norm_()" in str(outcome.error) or "model.optimizer(" in str(outcome.error)


def use_without_replacing(rank: int, size: int) -> None:
    accelerator_for = load("accelerate_loop").accelerator_for
    net = small_model()
    model = OURS(net)
    assert isinstance(model, TORCHS)
    with accelerator_for(Job()) as accelerator:
        assert accelerator.unwrap_model(model) is net
        assert accelerator.get_state_dict(model).keys() == net.state_dict().keys()
        with accelerator.no_sync(model):
            assert not model.do_sync
        assert model.do_sync


def test_accelerate_knows_a_model_that_the_user_wrapped(procs: Pool) -> None:
    procs(2).run(use_without_replacing, deadline_s=DEADLINE_S)


def strip_the_prefix(rank: int, size: int) -> None:
    model, reference = OURS(small_model()), TORCHS(small_model())
    found: dict[str, Any] = get_model_state_dict(model)
    expected: dict[str, Any] = get_model_state_dict(reference)
    assert list(found) == list(expected) == list(small_model().state_dict())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    doubled = {name: value * 2 for name, value in expected.items()}
    set_model_state_dict(model, dict(doubled))  # which changes the names in what it is given
    assert all(torch.equal(value, doubled[name]) for name, value in model.module.state_dict().items())


def test_torchs_checkpointing_strips_the_prefix(procs: Pool) -> None:
    procs(2).run(strip_the_prefix, deadline_s=DEADLINE_S)
