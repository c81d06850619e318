"""A rank among NCCL ranks is killed: the others are back in the same processes, and end with the same bits."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.launch.job import ElasticTerms
from paceline.launch.rank_environment import SURVIVORS
from tests.elastic_job import run_elastic
from tests.pool import Pool
from tests.procs import test_elastic_shards
from tests.procs.test_elastic import Fault, Script, train


def prepare(member: int) -> None:
    """Each rank takes itself for a host of its own, so that several can share one device."""
    os.environ.update(SURVIVORS, NCCL_HOSTID=f"member{member}", CUBLAS_WORKSPACE_CONFIG=":4096:8")
    os.environ.update(NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def on_nccl(member: int, script: Script) -> dict[str, Any]:
    prepare(member)
    return train(member, script)


def in_shards(member: int, script: test_elastic_shards.Script) -> dict[str, Any]:
    prepare(member)
    return test_elastic_shards.train(member, script)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("ranks", "where"), [(3, "forward"), (3, "backward"), (3, "in the update"), (4, "forward"), (4, "backward")]
)
def test_survivors_of_a_killed_rank_go_on_with_nccl(procs: Pool, tmp_path: Path, ranks: int, where: str) -> None:
    digests = []
    for name, faults in (("quiet", ()), ("struck", (Fault(1, 2, where),))):
        (tmp_path / name).mkdir()
        script = Script(faults, device="cuda")
        terms = ElasticTerms(minimum=1, maximum=ranks)
        job = run_elastic(procs, tmp_path / name, on_nccl, script, terms=terms, processes=ranks)
        job.check()
        digests.append({value["digest"] for value in job.values})
        assert len(job.losses) == len(faults)
    assert digests[0] == digests[1]
    assert len(digests[0]) == 1


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("placement", "where"), [("zero1", "after the update"), ("zero2", "backward"), ("zero3", "forward")]
)
def test_the_shard_of_a_killed_rank_comes_from_its_twin_with_nccl(
    procs: Pool, tmp_path: Path, placement: str, where: str
) -> None:
    """Two ranks hold each shard. The one that is killed is replaced."""
    digests = []
    for name, faults in (("quiet", ()), ("struck", (test_elastic_shards.Fault(1, 2, where),))):
        (tmp_path / name).mkdir()
        script = test_elastic_shards.Script(placement, faults, shard=2, device="cuda")
        terms = test_elastic_shards.ALWAYS_FOUR
        job = run_elastic(procs, tmp_path / name, in_shards, script, terms=terms, processes=4 + len(faults))
        job.check()
        digests.append({value["digest"] for value in job.values})
        assert len(job.losses) == len(faults)
    assert digests[0] == digests[1]
    assert len(digests[0]) == 1
