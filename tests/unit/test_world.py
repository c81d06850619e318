"""World: what each launcher's variables mean, and what is refused."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import UsageError, WorldError
from paceline.world import World

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
}
PET = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "job-node-0-0",
    "PET_MASTER_PORT": "29401",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "gpu[003-004]",
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NAME": "train",
}
SKYPILOT = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.1.0.4\n10.1.0.5"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "head"}
PMIX = {"PMIX_RANK": "2", **{name: value for name, value in OPEN_MPI.items() if name != "OMPI_COMM_WORLD_RANK"}}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "0",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
LSF = {
    "JSM_NAMESPACE_RANK": "6",
    "JSM_NAMESPACE_SIZE": "12",
    "JSM_NAMESPACE_LOCAL_RANK": "0",
    "JSM_NAMESPACE_LOCAL_SIZE": "6",
    "LSB_HOSTS": "batch1 n1 n1 n2 n2",
    "LSB_JOBID": "98765",
}


def tf_config(kind: str, index: int) -> dict[str, str]:
    cluster = {"chief": ["a:2222"], "worker": ["b:2222", "b:2223"], "ps": ["c:2222"]}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


# Variables → rank, size, local rank, local size, node, address, port, and what the source must say.
SETS: list[tuple[str, dict[str, str], tuple[int, int, int, int, int, str, int], str]] = [
    ("torchrun", TORCHRUN, (3, 4, 1, 2, 1, "10.0.0.1", 29400), "RANK"),
    (
        "by hand, loopback",
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5"},
        (1, 2, 1, 2, 0, "127.0.0.1", 5),
        "RANK",
    ),
    (
        "one process per pod",
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"},
        (1, 2, 0, 1, 1, "job-master-0", 23456),
        "RANK",
    ),
    ("torchrun's settings", PET, (1, 2, 0, 1, 1, "job-node-0-0", 29401), "PET_"),
    (
        "torchrun's settings, rendezvous endpoint",
        {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_RDZV_ENDPOINT": "head:29402"},
        (0, 2, 0, 1, 0, "head", 29402),
        "PET_",
    ),
    (
        "torchrun's settings, local rank known",
        {**PET, "PET_NPROC_PER_NODE": "4", "LOCAL_RANK": "3"},
        (7, 8, 3, 4, 1, "job-node-0-0", 29401),
        "PET_",
    ),
    ("Slurm", SLURM, (5, 8, 1, 4, 1, "gpu003", 19567), "Slurm"),
    ("SkyPilot", SKYPILOT, (1, 2, 0, 1, 1, "10.1.0.4", 29500), "SkyPilot"),
    (
        "SkyPilot, local rank known",
        {**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "8", "LOCAL_RANK": "2"},
        (10, 16, 2, 8, 1, "10.1.0.4", 29500),
        "SkyPilot",
    ),
    ("Open MPI", OPEN_MPI, (2, 3, 2, 3, 0, "127.0.0.1", 29500), "Open MPI"),
    ("MPICH", MPICH, (1, 4, 1, 2, 0, "head", 29500), "PMI"),
    ("PMIx", PMIX, (2, 3, 2, 3, 0, "127.0.0.1", 29500), "PMIx"),
    ("MVAPICH", MVAPICH, (0, 2, 0, 2, 0, "127.0.0.1", 29500), "MVAPICH"),
    ("LSF", LSF, (6, 12, 0, 6, 1, "n1", 10765), "LSF"),
    ("TF_CONFIG, chief", tf_config("chief", 0), (0, 3, 0, 1, 0, "a", 2222), "TF_CONFIG"),
    ("TF_CONFIG, worker", tf_config("worker", 1), (2, 3, 1, 2, 1, "a", 2222), "TF_CONFIG"),
    ("none", {}, (0, 1, 0, 1, 0, "", 0), "single process"),
    ("blank variables", {"RANK": " ", "WORLD_SIZE": ""}, (0, 1, 0, 1, 0, "", 0), "single process"),
    ("a shell in an allocation", {**SLURM, "SLURM_JOB_NAME": "bash"}, (0, 1, 0, 1, 0, "", 0), "single process"),
    ("an allocation without a task", {"SLURM_NTASKS": "8"}, (0, 1, 0, 1, 0, "", 0), "single process"),
]


@pytest.mark.parametrize(("environ", "expected", "source"), [row[1:] for row in SETS], ids=[row[0] for row in SETS])
def test_each_launcher_is_understood(
    environ: dict[str, str], expected: tuple[int, int, int, int, int, str, int], source: str
) -> None:
    world = World.from_env(environ)
    place = (world.rank, world.size, world.local_rank, world.local_size, world.node_rank)
    assert (*place, world.master_addr, world.master_port) == expected
    assert source in world.source


def test_the_order_of_launchers() -> None:
    present = {**TORCHRUN, **PET, **SLURM, **SKYPILOT, **OPEN_MPI, **LSF, **tf_config("chief", 0)}
    seen = []
    for first in (TORCHRUN, PET, SLURM, SKYPILOT, OPEN_MPI, LSF):
        seen.append(World.from_env(present).source.split()[0])
        present = {name: value for name, value in present.items() if name not in first}
    seen.append(World.from_env(present).source)
    assert seen == ["RANK", "PET_*,", "Slurm", "SkyPilot", "Open", "LSF", "TF_CONFIG"]


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[003-007,12],login1", "gpu003"),
        ("gpu[12,3-4]", "gpu12"),
        ("r[1-2]c-ib,x", "r1c-ib"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_slurm_list(nodelist: str, first: str) -> None:
    environ = {**SLURM, "SLURM_JOB_NODELIST": nodelist}
    assert World.from_env(environ).master_addr == first


def test_pbs_reads_its_host_file(tmp_path: Path) -> None:
    own = socket.gethostname()
    file = tmp_path / "nodes"
    file.write_text(f"first.cluster\nfirst.cluster\n{own}\n{own}\n")
    world = World.from_env({"PBS_NODEFILE": str(file)})
    assert (world.rank, world.size, world.master_addr, world.source) == (1, 2, "first.cluster", "PBS_NODEFILE")
    file.write_text("first\nsecond\n")
    with pytest.raises(WorldError, match="PBS_NODEFILE lists first, second, but this host is"):
        World.from_env({"PBS_NODEFILE": str(file)})
    with pytest.raises(WorldError, match="host file .* cannot be read"):
        World.from_env({"PBS_NODEFILE": str(tmp_path / "none")})


# Variables → what the message must name.
REFUSED: list[tuple[str, dict[str, str], list[str]]] = [
    ("rank = size", {**TORCHRUN, "RANK": "4"}, ["RANK=4", "WORLD_SIZE=4", "0 <= RANK < WORLD_SIZE"]),
    ("negative", {**TORCHRUN, "RANK": "-1"}, ["RANK='-1'", "whole number of at least 0"]),
    ("not a number", {**TORCHRUN, "WORLD_SIZE": "two"}, ["WORLD_SIZE='two'", "whole number"]),
    ("not a number at all", {**TORCHRUN, "WORLD_SIZE": "nan"}, ["WORLD_SIZE='nan'"]),
    ("infinite", {**TORCHRUN, "RANK": "inf"}, ["RANK='inf'"]),
    ("fraction", {**TORCHRUN, "RANK": "1.0"}, ["RANK='1.0'"]),
    ("underscore", {**TORCHRUN, "WORLD_SIZE": "1_0"}, ["WORLD_SIZE='1_0'"]),
    ("size zero", {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
    ("local rank = local size", {**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
    ("local size above size", {**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, ["local_size=9", "size=4"]),
    ("port", {**TORCHRUN, "MASTER_PORT": "70000"}, ["MASTER_PORT=70000", "1 to 65535"]),
    ("port zero", {**TORCHRUN, "MASTER_PORT": "0"}, ["MASTER_PORT=0"]),
    ("port name", {**TORCHRUN, "MASTER_PORT": "http"}, ["MASTER_PORT='http'"]),
    ("rank alone", {"RANK": "0"}, ["RANK=0 is set but WORLD_SIZE is not", "torchrun"]),
    ("size alone", {"WORLD_SIZE": "2"}, ["WORLD_SIZE=2 is set but RANK is not"]),
    ("half of MPI", {"PMI_RANK": "1"}, ["PMI_RANK=1 is set but PMI_SIZE is not"]),
    ("which of four", {**PET, "PET_NPROC_PER_NODE": "4"}, ["PET_NPROC_PER_NODE='4'", "LOCAL_RANK", "torchrun"]),
    ("automatic count", {**PET, "PET_NPROC_PER_NODE": "auto"}, ["PET_NPROC_PER_NODE='auto'"]),
    ("elastic nodes", {**PET, "PET_NNODES": "1:4"}, ["PET_NNODES='1:4'"]),
    ("Slurm rank", {**SLURM, "SLURM_PROCID": "8"}, ["SLURM_PROCID=8", "SLURM_NTASKS=8"]),
    ("a parameter server", tf_config("ps", 0), ["TF_CONFIG", "chief and worker"]),
    ("not JSON", {"TF_CONFIG": "{"}, ["TF_CONFIG='{'"]),
]


@pytest.mark.parametrize(("environ", "named"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_nonsense_is_refused_by_name(environ: dict[str, str], named: list[str]) -> None:
    with pytest.raises(WorldError) as caught:
        World.from_env(environ)
    for part in named:
        assert part in str(caught.value)


def test_a_broken_set_does_not_hide_behind_a_complete_one() -> None:
    assert World.from_env({"RANK": "0", **SLURM}).source == "Slurm"


def test_arguments_win_over_variables() -> None:
    world = World.from_env(TORCHRUN, rank=0, world_size=2, local_rank=0, master_addr="h", master_port=7)
    assert (world.rank, world.size, world.local_rank) == (0, 2, 0)
    assert (world.master_addr, world.master_port, world.source) == ("h", 7, "arguments")
    assert World.from_env(TORCHRUN, master_port=7) == World.from_env({**TORCHRUN, "MASTER_PORT": "7"})


def test_half_of_the_arguments_is_refused() -> None:
    with pytest.raises(UsageError, match="rank=1, world_size=None"):
        World.from_env({}, rank=1)
    with pytest.raises(UsageError, match="rank must be a whole number, got nan of type float"):
        World.from_env({}, rank=float("nan"), world_size=2)  # type: ignore[arg-type]
    with pytest.raises(WorldError, match="got rank=2 with size=2, expected rank < size"):
        World.from_env({}, rank=2, world_size=2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": -1}, "got rank=-1, expected a whole number of at least 0"),
        ({"rank": True, "size": 2}, "got rank=True"),
        ({"size": 0}, "got size=0, expected a whole number of at least 1"),
        ({"rank": float("nan")}, "got rank=nan"),
        ({"size": 2, "local_size": 3}, "local_size <= size"),
        ({"master_port": 65536}, "master_port=65536"),
    ],
)
def test_a_world_cannot_be_nonsense(values: dict[str, int], message: str) -> None:
    with pytest.raises(WorldError, match=message):
        World(**values)  # type: ignore[arg-type]


def test_reading_the_world_needs_no_torch() -> None:
    # The package's own front door may import torch; a launcher goes to the bottom layer directly.
    code = (
        "import sys, types; package = types.ModuleType('paceline'); package.__path__ = [sys.argv[1]]; "
        "sys.modules['paceline'] = package; import paceline.world; sys.exit('torch' in sys.modules)"
    )
    package = str(Path(sys.modules["paceline.world"].__path__[0]).parent)
    assert subprocess.run([sys.executable, "-c", code, package], check=False).returncode == 0
