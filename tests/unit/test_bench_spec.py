"""Settings of measurements, and the model that they name."""

import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.agreement_cost import AgreementSpec
from benchmarks.hooks_cost import HooksSpec
from benchmarks.lanes_cost import LanesSpec
from paceline.bench.allreduce import AllReduceSpec
from paceline.bench.commands import COMMANDS
from paceline.bench.contenders import CONTENDERS, ContenderName, find_contender, label_each, short_label
from paceline.bench.gpt import BenchGPT, build_model, global_batches, rank_batches
from paceline.bench.machinery import MachinerySpec
from paceline.bench.series import AccumulateSpec, RanksSpec
from paceline.bench.spec import MODELS, StepSpec, parse_sizes
from paceline.errors import UsageError
from paceline.memory_plan.numbers import show_bytes, show_count

CPU = torch.device("cpu")


@pytest.mark.parametrize(("text", "count"), [("4KiB", 4096), ("1 MiB", 1 << 20), ("16", 16), ("2gib", 2 << 30)])
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_sizes(text) == (count,)


def test_ranges_of_sizes() -> None:
    assert parse_sizes("4KiB..256KiB") == (4096, 16384, 65536, 262144)
    assert parse_sizes("4KiB..10KiB") == (4096, 10240)
    assert parse_sizes("1MiB,4KiB") == (4096, 1 << 20)


@pytest.mark.parametrize("text", ["", "x", "-4", "3", "4QB", "8KiB..4KiB", "5B..4KiB"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        parse_sizes(text)


def test_numbers_are_shown_short() -> None:
    assert [show_bytes(count) for count in (0, 512, 4096, 1020 << 10, 25 << 20, 3 << 30)] == [
        "0 B",
        "512 B",
        "4 KiB",
        "1,020 KiB",
        "25 MiB",
        "3 GiB",
    ]
    assert [show_count(count) for count in (30080, 5_300_000)] == ["30.1 K", "5.3 M"]


def test_a_contender_may_carry_arguments() -> None:
    found = ContenderName.parse("paceline:bucket_cap_mb=64:overlap=false:transport=torch:timeout=1.5")
    assert found.name == "paceline"
    assert dict(found.arguments) == {"bucket_cap_mb": 64, "overlap": False, "transport": "torch", "timeout": 1.5}
    assert find_contender("torch:bucket_cap_mb=8") is CONTENDERS["torch"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "gpt-9"}, "model='gpt-9': expected one of gpt-tiny, gpt-5m"),
        ({"device": "tpu"}, "device='tpu': expected one of cpu, cuda"),
        ({"zero_grad": "maybe"}, "zero_grad='maybe': expected one of none, zero"),
        ({"ranks": 0}, "ranks=0: expected at least 1"),
        ({"steps": 0.5}, "steps=0.5: expected a whole number"),
        ({"warmup": -1}, "warmup=-1: expected at least 0"),
        ({"contenders": ("torch", "torch", "torch")}, "each once, or twice for an A/A row"),
        ({"contenders": ()}, "one or more contenders"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StepSpec(**settings)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (AllReduceSpec, {"sizes": "big"}),
        (AccumulateSpec, {"values": "1,x"}),
        (RanksSpec, {"values": "0"}),
        (LanesSpec, {"lanes": "8", "ranks": "3,5"}),
        (LanesSpec, {"transport": ("smoke",)}),
        (AgreementSpec, {"starts": 0}),
        (HooksSpec, {"parameters": "100"}),
        (HooksSpec, {"contenders": ("gloo",)}),
        (HooksSpec, {"contenders": ("torch@.",)}),
        (MachinerySpec, {"contenders": ("paceline", "torch")}),
        (MachinerySpec, {"contenders": ("bare", "lanes")}),
        (MachinerySpec, {"rounds": 0}),
        (MachinerySpec, {"model": "gpt-9"}),
    ],
)
def test_settings_of_other_measurements_are_checked_too(kind: type[Any], settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        kind(**settings)


@pytest.mark.parametrize("text", ["nobody", "torch:x", "torch:=1"])
def test_unknown_contenders_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"no contender 'nobody'|name:key=value"):
        find_contender(text)


def test_a_contender_may_come_from_another_checkout() -> None:
    found = ContenderName.parse("paceline-torch@../before:overlap=false")
    assert (found.name, found.checkout, dict(found.arguments)) == ("paceline-torch", "../before", {"overlap": False})
    assert find_contender("paceline-torch@../before") is CONTENDERS["paceline-torch"]
    assert ContenderName.parse("paceline").sources == ""
    with pytest.raises(UsageError, match="only paceline's own contenders can come from another checkout"):
        find_contender("torch@../before")
    with pytest.raises(UsageError, match="expected the path of a checkout after the @"):
        find_contender("paceline@")


def test_a_contender_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from paceline.bench.contenders import Contender\n"
        "def build(context):\n"
        "    'my own way'\n"
        "slow = Contender('a slow way', build, needs=('no_such_module',))\n"
        "number = 3\n"
    )
    found = ContenderName.parse(f"{file}:slow:depth=2")
    assert (found.name, found.file, dict(found.arguments)) == ("slow", str(file), {"depth": 2})
    slow, plain = find_contender(f"{file}:slow:depth=2"), find_contender(f"{file}:build")
    assert (slow.about, plain.about) == ("a slow way", "my own way")
    assert slow.builder() is plain.builder()
    assert "not installed: no_such_module" in slow.why_absent("cpu") and not plain.why_absent("cpu")
    assert short_label(f"{file}:slow:depth=2 (A/A)") == "slow:depth=2 (A/A)"
    for text, message in (("number", "has no contender 'number'"), ("", "expected a contender as FILE.py:NAME")):
        with pytest.raises(UsageError, match=message):
            find_contender(f"{file}:{text}")
    with pytest.raises(UsageError, match="there is no file"):
        find_contender("nowhere.py:build")
    with pytest.raises(UsageError, match="there is no contender"):
        HooksSpec(contenders=(f"{file}:build",))


def test_the_peers_of_the_repository_are_contenders() -> None:
    peers = Path(__file__).parents[2] / "benchmarks" / "peers"
    names = ("clients.py:fabric", "deepspeed_zero.py:deepspeed2", "horovod_fusion.py:fusion", "mpi.py:mpi4py")
    for name in (*names, "mpi.py:mpi", "tensorflow_mirrored.py:tensorflow", "torch_others.py:dataparallel"):
        assert find_contender(f"{peers}/{name}").about
    with pytest.raises(UsageError, match="FILE.py:NAME in benchmarks/peers of the repository"):
        find_contender("fabric")


def test_a_contender_that_is_named_twice_is_compared_with_itself() -> None:
    labels = label_each(["floor", "torch", "paceline@../before", "torch", "paceline@../before"])
    assert labels == ("floor", "torch", "paceline@../before", "torch (A/A)", "paceline@../before (A/A)")
    assert label_each(labels) == labels
    assert find_contender("torch (A/A)") is CONTENDERS["torch"]
    assert ContenderName.parse(labels[-1]) == ContenderName("paceline", (), "../before")


def test_the_machinery_is_that_of_one_rank() -> None:
    step = MachinerySpec(micro_batch=2, compile=True, device="cuda", backend="nccl").step()
    assert (step.ranks, step.micro_batch, step.compile, step.device) == (1, 2, True, "cuda")
    assert label_each(MachinerySpec().contenders)[:2] == ("bare", "bare (A/A)")


def test_the_narrow_model_has_many_tensors() -> None:
    with torch.device("meta"):
        assert len(list(BenchGPT(MODELS["gpt-narrow"]).parameters())) == 437


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_setting_is_documented_and_reaches_workers_unchanged(command: Any) -> None:
    assert all(item.metadata["about"] for item in fields(command.spec))
    spec = command.spec()
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_a_series_is_the_step_comparison_at_each_value() -> None:
    assert AccumulateSpec(micro_batch=4).at(8) == StepSpec(micro_batch=4, accumulate=8, steps=12, warmup=3)
    assert RanksSpec(model="gpt-34m").at(3) == StepSpec(model="gpt-34m", ranks=3, steps=12, warmup=3)
    settings = [{item.name for item in fields(kind)} for kind in (AccumulateSpec, RanksSpec)]
    assert settings[0] ^ settings[1] == {AccumulateSpec.over, RanksSpec.over}


def test_lanes_and_the_plain_mode_have_the_same_micros() -> None:
    spec = LanesSpec(lanes="2,8", ranks="1,2,3,8", steps=30, warmup=5)
    assert spec.points() == [(2, 1), (2, 2), (8, 1), (8, 2), (8, 8)]
    assert spec.at(8, 1) == StepSpec(ranks=1, accumulate=8, contenders=("paceline", "lanes"))
    both = ("paceline", "lanes", "paceline-torch", "lanes-torch")
    assert spec.at(8, 2) == StepSpec(ranks=2, accumulate=4, contenders=both)
    assert LanesSpec(device="cuda").at(2, 2).contenders == both[2:], "memory of a GPU is not shared"


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt-5m"])
def test_parameters_are_counted_without_torch(name: str) -> None:
    spec = StepSpec(model=name)
    model = build_model(spec, CPU)
    count = sum(param.numel() for param in model.parameters())
    assert (spec.shape.parameters, spec.shape.gradient_bytes) == (count, 4 * count)


def test_the_models_have_the_sizes_of_their_names() -> None:
    counts = {name: shape.parameters for name, shape in MODELS.items()}
    assert counts["gpt-5m"] == pytest.approx(5.3e6, rel=0.01)
    assert counts["gpt-34m"] == pytest.approx(33.7e6, rel=0.01)
    assert 120e6 < counts["gpt2"] < 165e6


def test_one_process_gets_the_batches_of_all_ranks() -> None:
    spec = StepSpec(model="gpt-tiny", accumulate=2, micro_batch=3)
    ranks = [rank_batches(spec, CPU, rank, 7) for rank in range(2)]
    for microbatch, (x, y) in enumerate(global_batches(spec, CPU, 7)):
        assert torch.equal(x, torch.cat([batches[microbatch][0] for batches in ranks]))
        assert torch.equal(y[:, :-1], x[:, 1:])
    assert not torch.equal(ranks[0][0][0], ranks[1][0][0])


def test_weights_are_the_same_in_every_process() -> None:
    spec = StepSpec(model="gpt-tiny")
    ours, theirs = build_model(spec, CPU), build_model(spec, CPU)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
