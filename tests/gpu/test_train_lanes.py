"""`paceline train` in lanes on one GPU: 1, 2 and 4 NCCL ranks end with one digest."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SETTINGS = {
    "size": "tiny",
    "steps": 30,
    "lanes": 8,
    "batch": 2,
    "seed": 7,
    "dropout": 0.1,
    "dtype": "bf16",
    "eval_every": 0,
    "eval_samples": 8,
    "sample": 0,
    "save_every": 0,
    "check_every": 4,
}


def digest(folder: Path, ranks: int, device: str) -> str:
    """Each rank takes itself for a host of its own, so several may share a GPU."""
    folder.mkdir()
    settings = {**SETTINGS, "ranks": ranks, "device": device, "out": str(folder)}
    (folder / "config.toml").write_text("\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items()))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": port, "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1}
    shared |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    children = []
    for rank in range(ranks):
        own = {"RANK": rank, "GROUP_RANK": rank, "NCCL_HOSTID": f"rank{rank}"}
        environ = os.environ | {name: str(value) for name, value in (shared | own).items()}
        children.append(subprocess.Popen([sys.executable, "-m", "paceline.train", str(folder)], env=environ))
    assert [child.wait() for child in children] == [0] * ranks
    return str(json.loads((folder / "result.json").read_text())["digest"])


@pytest.mark.timeout(240)
def test_any_number_of_nccl_ranks_gives_one_digest(tmp_path: Path) -> None:
    found = {ranks: digest(tmp_path / str(ranks), ranks, "cuda") for ranks in (1, 2, 4)}
    assert len(set(found.values())) == 1, found
