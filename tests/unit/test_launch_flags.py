"""From a command line and an environment to a job."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.run_flags import WITHOUT_EFFECT, Refused, notes, parse
from paceline.cli.run_job import hidden, job_from, shown
from paceline.errors import UsageError
from paceline.launch import Job
from paceline.launch.devices import gpu_count
from paceline.launch.seat import Seat, environment_of

SECRET = {"PACELINE_JOB_SECRET": "sixteen bytes or more"}


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


def job(*words: str, **environ: str) -> Job:
    return job_from(parse([*words, "train.py"], environ), environ)


@pytest.mark.parametrize(
    "words",
    [
        ["-n", "3"],
        ["-n3"],
        ["-np", "3"],
        ["--nproc-per-node", "3"],
        ["--nproc_per_node=3"],
        ["--num-processes", "3"],
        ["--num_processes=3"],
    ],
)
def test_ways_to_say_how_many(words: list[str]) -> None:
    assert job(*words).ranks == 3


def test_torchruns_variables_are_defaults() -> None:
    found = job("--max-restarts", "1", PET_NPROC_PER_NODE="4", PET_MAX_RESTARTS="7", PET_RDZV_ID="nightly")
    assert (found.ranks, found.max_restarts, found.run_id) == (4, 1, "nightly")


def test_several_machines_in_torchruns_words() -> None:
    there: dict[str, Any] = {"nodes": 2, "node_rank": 1, "master_addr": "10.0.0.1", "master_port": 29500}
    said = [
        job("--nnodes", "2", "--node_rank", "1", "--master_addr", "10.0.0.1", **SECRET),
        job("--nnodes=2:2", "--node-rank=1", "--rdzv-endpoint=10.0.0.1:29500", "--rdzv-backend=c10d", **SECRET),
        job(PET_NNODES="2", PET_NODE_RANK="1", PET_MASTER_ADDR="10.0.0.1", PET_MASTER_PORT="29500", **SECRET),
        job(
            SKYPILOT_NODE_RANK="1",
            SKYPILOT_NUM_NODES="2",
            SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
            **SECRET,
        ),
    ]
    for found in said:
        assert {name: getattr(found, name) for name in there} == there


SLURM = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
}


def test_slurm_steps_are_understood_and_shells_in_an_allocation_left_alone() -> None:
    found = job(SLURM_STEP_NUM_NODES="2", **SLURM, **SECRET)
    assert (found.nodes, found.node_rank, found.master_addr, found.master_port) == (2, 1, "gpu03", 19567)
    assert job(**SLURM).nodes == 1
    assert job("--standalone", SLURM_STEP_NUM_NODES="2", **SLURM).nodes == 1


def test_flags_win_over_the_scheduler() -> None:
    found = job("--master-port", "4000", SLURM_STEP_NUM_NODES="2", **SLURM, **SECRET)
    assert (found.nodes, found.master_addr, found.master_port) == (2, "gpu03", 4000)


@pytest.mark.parametrize(
    ("endpoint", "there"), [("head", ("head", 29500)), ("head:7", ("head", 7)), ("[fd00::1]:7", ("fd00::1", 7))]
)
def test_endpoints(endpoint: str, there: tuple[str, int]) -> None:
    found = job("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", endpoint, **SECRET)
    assert (found.master_addr, found.master_port) == there
    with pytest.raises(UsageError, match="--rdzv-endpoint head:port: expected HOST:PORT"):
        job("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "head:port", **SECRET)


def test_standalone_wins_over_an_endpoint() -> None:
    found = job("--standalone", "--rdzv-endpoint", "10.0.0.1:5", "--nnodes", "1")
    assert (found.master_addr, found.master_port) == ("127.0.0.1", 0)


def test_a_secret_comes_from_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("another one, from a file\n")
    words = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.1")
    found = job(*words, "--secret-file", str(tmp_path / "secret"), **SECRET)
    assert found.secret == b"another one, from a file"
    assert "another one" not in repr(found)
    with pytest.raises(UsageError, match="--secret-file missing: No such file"):
        job(*words, "--secret-file", "missing")
    with pytest.raises(UsageError, match="expected at least 16 bytes .* got 5"):
        job(*words, PACELINE_JOB_SECRET="short")


def test_a_name_that_is_a_path_stays_in_the_folder() -> None:
    assert job("--rdzv-id", "../../etc", "--log-dir", "logs").run_dir == Path("logs/.._.._etc")


def test_flags_without_effect_are_accepted_and_say_so() -> None:
    words = []
    for name in WITHOUT_EFFECT:
        words += [f"--{name}"] if name in ("run_path", "virtual_local_rank") else [f"--{name}", "1"]
    said = notes(parse([*words, "train.py"], {}))
    assert len(said) == len(WITHOUT_EFFECT)
    assert all("changes nothing here" in text for text in said)
    assert notes(parse(["-n", "2", "train.py", "--tee", "3"], {})) == []


def test_everything_after_the_script_is_its_own() -> None:
    flags = parse(["-n", "2", "train.py", "-n", "7", "--help", "--max-restarts=3"], {})
    assert (flags.nproc_per_node, flags.arguments) == ("2", ["-n", "7", "--help", "--max-restarts=3"])


def test_abbreviations_are_not_guessed() -> None:
    with pytest.raises(Refused, match="--max"):
        parse(["--max", "3", "train.py"], {})


def test_what_is_shown() -> None:
    flags = parse(["--local-ranks-filter", "0,2", "-r", "0:3,1:1", "train.py"], {})
    assert [shown(flags, 3)(rank) for rank in range(3)] == [True, False, True]
    assert [hidden(flags, 3)(rank) for rank in range(3)] == [3, 1, 0]
    assert hidden(parse(["-r", "3", "train.py"], {}), 6)(5) == 3
    with pytest.raises(UsageError, match="--redirects 0:9"):
        hidden(parse(["-r", "0:9", "train.py"], {}), 3)
    with pytest.raises(UsageError, match="--redirects 0:3,1:1: there is no rank 1 .* expected some of rank 0"):
        hidden(flags, 1)
    with pytest.raises(UsageError, match="--local-ranks-filter x: expected a whole number"):
        shown(parse(["--local-ranks-filter", "x", "train.py"], {}), 3)


@pytest.mark.parametrize(
    ("environ", "most"), [({"CUDA_VISIBLE_DEVICES": ""}, 0), ({"CUDA_VISIBLE_DEVICES": "-1"}, 0), ({}, 1 << 10)]
)
def test_gpus_are_counted(environ: Mapping[str, str], most: int) -> None:
    assert 0 <= gpu_count(environ) <= most


def test_what_the_user_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    monkeypatch.setenv("PACELINE_JOB_SECRET", "not for ranks")
    monkeypatch.setenv("RANK", "77")
    found = environment_of(job("-n", "2"), Seat(4, 6, "127.0.0.1", 5, "lo", 2, "id"), 1, "9:9", "8:8")
    assert (found["OMP_NUM_THREADS"], found["GLOO_SOCKET_IFNAME"]) == ("7", "eth9")
    assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == ("5", "1", "6")
    assert (found["TORCHELASTIC_RESTART_COUNT"], found["TORCHELASTIC_RUN_ID"]) == ("2", "id")
    assert "PACELINE_JOB_SECRET" not in found
