"""From a command line and an environment to a job."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.cli.run_flags import WITHOUT_EFFECT, notes, parse
from paceline.cli.run_job import hidden, job_from
from paceline.errors import UsageError
from paceline.launch import ElasticTerms, Job
from paceline.launch.devices import gpu_count
from paceline.launch.rank_environment import environment_of


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


ADDRESS = "--master_addr=10.0.0.1"
ENDPOINT = "--rdzv-endpoint 10.0.0.1:29500"


@pytest.mark.parametrize(
    ("words", "environ", "command"),
    [
        (["--nnodes", "2", "--node_rank", "1", ADDRESS], {}, f"--nnodes 2 --nproc-per-node 1 … {ENDPOINT} train.py"),
        (["--nnodes=1:4", "-n", "4"], {}, "--nnodes 1:4 --nproc-per-node 4 … --rdzv-endpoint HOST:29500 train.py"),
        (
            ["--nnodes=2", "-n", "auto", "--rdzv-endpoint=head:7", "--rdzv-id=a", "--max-restarts=3", "-m"],
            {},
            "--nnodes 2 --nproc-per-node auto … --rdzv-endpoint head:7 --rdzv-id a --max-restarts 3 --module train.py",
        ),
        ([], {"PET_NNODES": "2", "PET_NODE_RANK": "1"}, "--nnodes 2 --nproc-per-node 1 … --rdzv-endpoint HOST:29500"),
        (
            [],
            {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"},
            f"--nnodes 2 --nproc-per-node 1 … {ENDPOINT} train.py",
        ),
        ([], {"SLURM_STEP_NUM_NODES": "2", **SLURM}, "--nnodes 2 --nproc-per-node 1 … --rdzv-endpoint gpu03:19567"),
        ([ADDRESS], {}, f"--nnodes NODES --nproc-per-node 1 … {ENDPOINT}"),
    ],
)
def test_for_several_machines_the_torchrun_command_is_named(
    words: list[str], environ: dict[str, str], command: str
) -> None:
    with pytest.raises(UsageError, match="starts the ranks of one machine") as refused:
        job(*words, **environ)
    assert f"torchrun {command.replace('…', '--rdzv-backend c10d')}" in str(refused.value)


def test_the_torchrun_command_keeps_the_arguments_of_the_script() -> None:
    with pytest.raises(UsageError, match=r"train\.py --name 'two words' "):
        job_from(parse(["--nnodes", "2", "train.py", "--name", "two words"], {}), {})


@pytest.mark.parametrize(
    "words",
    [
        ["--nnodes", "1"],
        ["--nnodes=1:1", "--node-rank=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
        ["--master-addr", "127.0.0.1"],
        ["--standalone", "--rdzv-endpoint", "10.0.0.1:5", "--nnodes", "1"],
    ],
)
def test_one_machine_in_torchruns_words(words: list[str]) -> None:
    assert job(*words).master_port == 0


def test_shells_in_an_allocation_are_one_machine() -> None:
    assert job(**SLURM).ranks == 1
    assert job("--standalone", SLURM_STEP_NUM_NODES="2", **SLURM).ranks == 1


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
    with pytest.raises(UsageError, match="--max"):
        parse(["--max", "3", "train.py"], {})


def test_what_is_shown() -> None:
    flags = parse(["--local-ranks-filter", "0,2", "-r", "0:3,1:1", "train.py"], {})
    assert hidden(flags, 4) == [3, 3, 0, 3]
    assert hidden(parse(["-r", "0:3,1:1", "train.py"], {}), 3) == [3, 1, 0]
    assert hidden(parse(["-r", "2", "train.py"], {}), 3) == [2, 2, 2]
    with pytest.raises(UsageError, match="--redirects 0:9"):
        hidden(parse(["-r", "0:9", "train.py"], {}), 3)
    with pytest.raises(UsageError, match="--redirects 0:3,1:1: there is no rank 1; expected ranks among 0"):
        hidden(flags, 1)
    with pytest.raises(UsageError, match="--local-ranks-filter x: expected a whole number"):
        hidden(parse(["--local-ranks-filter", "x", "train.py"], {}), 3)


@pytest.mark.parametrize(
    ("environ", "most"), [({"CUDA_VISIBLE_DEVICES": ""}, 0), ({"CUDA_VISIBLE_DEVICES": "-1"}, 0), ({}, 1 << 10)]
)
def test_gpus_are_counted(environ: Mapping[str, str], most: int) -> None:
    assert 0 <= gpu_count(environ) <= most


def test_what_the_user_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    monkeypatch.setenv("RANK", "77")
    found = environment_of(job("-n", "2", "--rdzv-id", "id"), 1, 5, 2, os.environ)
    assert (found["OMP_NUM_THREADS"], found["GLOO_SOCKET_IFNAME"]) == ("7", "eth9")
    assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"]) == ("1", "1", "2")
    assert (found["TORCHELASTIC_RESTART_COUNT"], found["TORCHELASTIC_RUN_ID"]) == ("2", "id")


def test_an_elastic_job_has_a_minimum_and_a_maximum() -> None:
    found = job("--ranks", "2:4", "--spares", "1", "--max-losses", "7", "--recovery-timeout", "60")
    assert found.elastic == ElasticTerms(minimum=2, maximum=4, spares=1, max_losses=7, recovery_s=60.0)
    assert (found.ranks, found.slots) == (4, 5)
    assert job("--ranks", "3").elastic == ElasticTerms(minimum=3, maximum=3)
    assert job("-n", "3").elastic is None
    assert job("-n", "3").slots == 3


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--ranks", "4:2"], "--ranks 4:2: expected MIN:MAX with a MIN of at least 1 and at most MAX"),
        (["--ranks", "0:2"], "with a MIN of at least 1"),
        (["--ranks", "some"], "--ranks some: expected MIN:MAX, such as 2:4"),
        (["--ranks", "1:2", "-n", "2"], "--ranks 1:2 and -n 2 cannot be combined"),
        (["--spares", "1"], "--spares needs --ranks MIN:MAX"),
        (["--max-losses", "1"], "--max-losses needs --ranks MIN:MAX"),
        (["--recovery-timeout", "9"], "--recovery-timeout needs --ranks MIN:MAX"),
        (["--ranks", "1:2", "--spares", "-1"], "--spares -1: expected a whole number of at least 0"),
        (["--ranks", "1:2", "--max-losses", "x"], "--max-losses x: expected a whole number"),
        (["--ranks", "1:2", "--recovery-timeout", "x"], "--recovery-timeout x: expected a number of seconds"),
        (["--ranks", "1:2", "--spares", "1", "--gpu-ids", "0,1"], "2 ranks and 1 spares need 3 GPUs, got 2"),
    ],
)
def test_an_elastic_job_that_cannot_be(words: list[str], complaint: str) -> None:
    with pytest.raises(UsageError, match=re.escape(complaint)):
        job(*words)


def test_a_member_is_told_its_number_and_survives_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    found = environment_of(job("--ranks", "1:2"), 1, 99, 0, os.environ, member=5)
    assert (found["PACELINE_MEMBER"], found["RANK"], found["WORLD_SIZE"]) == ("5", "1", "2")
    assert (found["TORCH_NCCL_ENABLE_MONITORING"], found["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("0", "1")
    assert "TORCH_NCCL_ENABLE_MONITORING" not in environment_of(job("-n", "2"), 1, 99, 0, os.environ)
