"""A rank among NCCL ranks is killed: the others are back in the same processes, and end with the same bits."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.launch.job import ElasticTerms
from tests.elastic_job import run_elastic
from tests.pool import Pool
from tests.procs.test_elastic import Fault, Script, train


def on_nccl(member: int, script: Script) -> dict[str, Any]:
    """Each rank takes itself for a host of its own, so that several can share one device."""
    os.environ.update(
        NCCL_HOSTID=f"member{member}",
        NCCL_SOCKET_IFNAME="lo",
        GLOO_SOCKET_IFNAME="lo",
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
        TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
        TORCH_NCCL_RETHROW_CUDA_ERRORS="0",
        TORCH_NCCL_ENABLE_MONITORING="0",
        TORCH_NCCL_DUMP_ON_TIMEOUT="0",
    )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return train(member, script)


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
