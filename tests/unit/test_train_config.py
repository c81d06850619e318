"""Settings of `paceline train`: what is accepted, and what is said about what is not."""

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli.train import job_of
from paceline.launch.job import ElasticTerms
from paceline.train.config import ConfigError, TrainConfig, build, from_toml, to_toml
from paceline.train.sizes import SIZES

CHOICES = {item.name: item.metadata["choices"] for item in fields(TrainConfig) if item.metadata["choices"]}


def test_what_is_printed_can_be_read_back(tmp_path: Path) -> None:
    config = TrainConfig(data='a "quoted"\\path\n', size="gpt2", heads=6, learning_rate=1e-4, audit=True)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert build(from_toml(file)) == config


def test_settings_may_stand_in_a_table_and_with_dashes(tmp_path: Path) -> None:
    file = tmp_path / "project.toml"
    file.write_text('[other]\nx = 1\n[train]\nlearning-rate = 1\nsize = "nano"\n')
    assert build(from_toml(file)) == TrainConfig(learning_rate=1.0, size="nano")


def test_explicit_shapes_win_over_the_size() -> None:
    shape = TrainConfig(size="small", layers=3, context=99).shape
    assert (shape.layers, shape.width, shape.context) == (3, SIZES["small"].width, 99)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": "huge"}, r"size='huge': expected one of nano, tiny"),
        ({"tokenizer": "words"}, r"tokenizer='words': expected one of bytes, bpe"),
        ({"steps": 0}, r"steps=0: expected at least 1"),
        ({"steps": 1.5}, r"steps=1.5: expected a whole number"),
        ({"steps": True}, r"steps=True: expected a whole number"),
        ({"learning_rate": float("nan")}, r"learning_rate=nan: expected 0 to 10"),
        ({"dropout": 1.0}, r"dropout=1.0: expected 0 to 0.9"),
        ({"keep": 1}, r"keep=1: expected 2 to 1000"),
        ({"width": 100, "heads": 3}, r"width=100 and heads=3: expected a width divisible"),
        ({"audit_every": 5, "lanes": 0}, r"audit_every=5 with lanes=0 .* expected lanes"),
        ({"audit_every": 5, "placement": "zero3"}, r"placement='zero3': expected lanes, .* other than zero3"),
        ({"audit": "yes"}, r"audit='yes': expected true or false"),
        ({"stepz": 1}, r"'stepz' is not a setting: expected one of accumulate"),
    ],
)
def test_a_wrong_setting_is_named_with_what_it_accepts(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(settings)


def test_ranks_that_cannot_be_cut_into_shards_are_refused() -> None:
    config = TrainConfig(placement="zero2", shard=2)
    config.check_ranks(4)
    with pytest.raises(ConfigError, match="shard=2 does not divide 3 ranks; expected 0 or one of 1, 3"):
        config.check_ranks(3)
    with pytest.raises(ConfigError, match="shard=2: placement='ddp' makes no shards"):
        TrainConfig(shard=2)


def test_copies_say_how_many_ranks_hold_each_shard() -> None:
    config = TrainConfig(placement="zero2", copies=2)
    config.check_ranks(4)
    assert (config.shard_size(4), config.shard_size(6)) == (2, 3)
    assert (TrainConfig(placement="zero2", shard=2).shard_size(6), TrainConfig().shard_size(6)) == (2, 0)
    with pytest.raises(ConfigError, match="copies=2 does not divide 3 ranks; expected 0 or one of 1, 3"):
        config.check_ranks(3)
    with pytest.raises(ConfigError, match="copies=2: placement='ddp' makes no shards"):
        TrainConfig(copies=2)
    with pytest.raises(ConfigError, match="shard=2 and copies=2 say the same in two ways"):
        TrainConfig(placement="zero1", shard=2, copies=2)


def test_settings_of_the_job_are_those_of_paceline_run(tmp_path: Path) -> None:
    job = job_of(TrainConfig(), 2, tmp_path)
    assert (job.elastic, job.hang_timeout_s, job.shutdown_timeout_s) == (None, None, 30.0)
    given = TrainConfig(min_ranks=1, max_losses=3, recovery_timeout=5.0, hang_timeout=0.0, shutdown_timeout=9.0)
    job = job_of(given, 2, tmp_path)
    assert job.elastic == ElasticTerms(minimum=1, maximum=2, max_losses=3, recovery_s=5.0)
    assert (job.hang_timeout_s, job.shutdown_timeout_s) == (0.0, 9.0)
    assert job_of(TrainConfig(min_ranks=1), 2, tmp_path).elastic == ElasticTerms(minimum=1, maximum=2)
    with pytest.raises(ConfigError, match="max_losses=3 and min_ranks=0: .* only with --min-ranks"):
        TrainConfig(max_losses=3).check_ranks(2)


def test_files_that_are_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read"):
        from_toml(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("steps = = 1")
    with pytest.raises(ConfigError, match=r"is not TOML"):
        from_toml(broken)


@given(st.sampled_from(sorted(CHOICES)), st.text(max_size=5))
def test_no_choice_is_taken_that_is_not_listed(name: str, value: str) -> None:
    if value in CHOICES[name]:
        assert getattr(build({name: value}), name) == value
    else:
        with pytest.raises(ConfigError):
            build({name: value})


def test_a_batch_that_was_not_given_is_chosen_for_the_device() -> None:
    assert TrainConfig().settled(on_gpu=False).batch == 2
    assert TrainConfig(batch=3).settled(on_gpu=True).batch == 3
    chosen = {size: TrainConfig(size=size).settled(on_gpu=True) for size in ("tiny", "gpt2", "gpt2-xl")}
    assert chosen["gpt2"].batch * chosen["gpt2"].shape.context == 16384
    assert chosen["tiny"].batch * chosen["tiny"].shape.context == 16384
    assert 1 <= chosen["gpt2-xl"].batch < chosen["gpt2"].batch
