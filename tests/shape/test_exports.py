"""The public names are a promise: adding or removing one is a decision, made here."""

import subprocess
import sys

import paceline

PUBLIC = [
    "Agreement",
    "Checkpointer",
    "DistributedDataParallel",
    "DistributedSampler",
    "Elastic",
    "Loader",
    "NoCheckpoint",
    "Preemption",
    "SampleLog",
    "World",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "digest",
    "export_weights",
    "get",
    "init",
    "plan",
    "shutdown",
]


def test_public_names() -> None:
    assert sorted(paceline.__all__) == PUBLIC


def test_every_public_name_is_there_and_listed() -> None:
    for name in PUBLIC:
        assert getattr(paceline, name) is not None
        assert name in dir(paceline)


def test_core_needs_torch_alone() -> None:
    code = (
        "import sys; import paceline; [getattr(paceline, name) for name in paceline.__all__]; "
        "extras = {'accelerate', 'lightning_fabric', 'hypothesis', 'matplotlib', 'pytest', "
        "'pytorch_lightning', 'rich', 'safetensors', 'tokenizers', 'transformers', 'typer'}; "
        "extras &= sys.modules.keys(); "
        "sys.exit(' '.join(extras) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_dir_offers_can_be_had() -> None:
    for name in dir(paceline):
        assert getattr(paceline, name) is not None
