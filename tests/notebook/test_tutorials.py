"""The tutorials in examples/notebooks, run as a learner runs them: all cells, from top to bottom."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.execute import errors, execute, nbformat, number, said, shown

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NAMES = ("1_ddp_from_scratch", "2_making_it_fast", "3_what_it_costs")
ROUNDING = 1e-6  # float32, numbers of about 1


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", 4)


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"-?\d+\.\d+", text)]


def has_panel(notebook: Any, cell_id: str) -> bool:
    return any("paceline-panel" in html for html in shown(notebook, cell_id, "text/html"))


@pytest.mark.parametrize("name", NAMES)
def test_a_tutorial_is_stored_clean(name: str) -> None:
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    notebook = nbformat.reads(text, 4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    assert notebook.metadata.kernelspec.name == "python3"
    assert len(text) < 50_000
    assert cells[-1].source == "%dist_shutdown"
    assert max(cell.source.count("\n") for cell in cells) < 30, "a cell is read at one glance"


def test_all_tutorials_are_here() -> None:
    assert tuple(sorted(file.stem for file in FOLDER.glob("*.ipynb"))) == NAMES


# ---- 1: DDP from scratch


@pytest.fixture(scope="module")
def scratch() -> Any:
    return execute(read(NAMES[0]))


def test_only_the_check_of_unequal_seeds_fails(scratch: Any) -> None:
    found = errors(scratch)
    assert list(found) == ["check-fails"]
    assert found["check-fails"].startswith("ValueError on ranks 0-1 (2 of 2): the replicas differ by 0.")
    assert "seed every rank alike" in found["check-fails"]
    assert number(scratch, "check-passes", "replicas differ by") == 0.0


def test_ranks_have_memories_of_their_own_and_meet_in_collectives(scratch: Any) -> None:
    assert sorted(said(scratch, "get").split("\n")) == ["", "(0, 2, 0)", "(1, 2, 1)"]
    assert sorted(said(scratch, "who-knows").split()) == ["False", "True"]
    assert set(said(scratch, "first-sum").split()) == {"3.0"}


def test_replicas_drift_apart_without_sync_and_are_equal_with_it(scratch: Any) -> None:
    apart = [number(scratch, "diverge-code", f"after step {step:2}: replicas differ by") for step in (1, 10, 30)]
    assert apart[0] > 0.0 and apart[-1] > apart[0]
    assert number(scratch, "synced-train", "replicas differ by") == 0.0
    assert number(scratch, "train-code", "replicas differ by") == 0.0
    assert number(scratch, "train-code", "epoch 11: loss") < number(scratch, "train-code", "epoch  0: loss")


def test_the_mean_of_the_ranks_is_the_gradient_of_the_whole_batch(scratch: Any) -> None:
    one, other = re.findall(r"own gradient +(\S+)", said(scratch, "before-after"))
    mean = number(scratch, "before-after", "mean of all ranks")
    assert (float(one) + float(other)) / 2 == pytest.approx(mean, abs=1e-6)
    assert number(scratch, "whole-batch", "off by") < ROUNDING
    assert "every sample once: True" in said(scratch, "share-check")


def test_accumulated_micros_equal_one_batch(scratch: Any) -> None:
    assert number(scratch, "accumulate-check", "max difference") < ROUNDING
    assert "syncs: 1 and 1" in said(scratch, "accumulate-check")


def test_mistakes_of_accumulation_are_seen(scratch: Any) -> None:
    assert number(scratch, "mistake-divide", "the gradient is") == pytest.approx(4.0, abs=0.001)
    assert number(scratch, "mistake-first", "the replicas differ by") > 0.0
    assert "UnreducedGradients" in said(scratch, "guard-code")


def test_the_hand_written_class_and_ours_agree(scratch: Any) -> None:
    assert has_panel(scratch, "real-train")
    assert number(scratch, "real-compare", "replicas of the real one differ by") == 0.0
    assert number(scratch, "real-compare", "max difference") < ROUNDING
    assert number(scratch, "real-start-code", "before:") > 0.0
    assert number(scratch, "real-start-code", "after:") == 0.0


# ---- 2: making it fast


@pytest.fixture(scope="module")
def fast() -> Any:
    return execute(read(NAMES[1]))


def test_throughput_is_measured(fast: Any) -> None:
    assert not errors(fast)
    assert number(fast, "alone-code", "one process:") > 0
    assert number(fast, "threads-code", "both ranks:") > 0
    together = number(fast, "two-code", "2 processes:")
    ratio = together / number(fast, "alone-code", "one process:")
    assert number(fast, "two-ratio", "") == pytest.approx(ratio, rel=0.01, abs=0.006)


@pytest.mark.parametrize("cell_id", ["two-code", "auto-code", "no-overlap", "with-overlap", "no-sync-code"])
def test_a_training_cell_ends_with_the_panel(fast: Any, cell_id: str) -> None:
    assert has_panel(fast, cell_id)


def test_data_parallel_is_the_module_itself_without_gpus_and_is_timed_with_threads(fast: Any) -> None:
    assert "same output as the bare module: True" in said(fast, "dp-code")
    assert number(fast, "dp-time", "2 threads, as DataParallel:") > 0
    assert number(fast, "dp-time", "2 processes, as DDP:") == number(fast, "two-code", "2 processes:")


def test_buckets_begin_with_the_last_layer(fast: Any) -> None:
    found = re.findall(r"bucket (\d): \S+ MiB, \d gradients, (\S+)", said(fast, "buckets-code"))
    assert sorted(set(found)) == [("0", "12.bias"), ("1", "6.bias"), ("2", "2.bias")]
    assert "predicted exposed" in said(fast, "auto-code")


def test_communication_is_hidden_only_with_overlap(fast: Any) -> None:
    off, on = (numbers(line) for line in said(fast, "compare-overlap").splitlines()[1:])
    assert off[0] == 0.0 and off[1] > 0.0
    assert on[0] > 0.0


def test_no_sync_sends_a_quarter(fast: Any) -> None:
    found = re.findall(r"(\d+) buckets", said(fast, "no-sync-compare"))
    assert found == ["12", "3"]
    rows = [re.findall(r"(\d+)%", line) for line in said(fast, "where-code").splitlines()[1:]]
    assert len(rows) == 4
    assert all(97 <= sum(map(int, row)) <= 103 for row in rows)


# ---- 3: what it costs


@pytest.fixture(scope="module")
def costs() -> Any:
    return execute(read(NAMES[2]))


def test_the_plan_is_near_what_was_measured(costs: Any) -> None:
    assert not errors(costs)
    off = [float(text) for text in re.findall(r"the plan is (\S+)%", said(costs, "against-all"))]
    assert len(off) == 2
    assert max(map(abs, off)) < 30


def test_every_way_to_sixteen_bytes(costs: Any) -> None:
    per_parameter = [numbers(line)[1] for line in said(costs, "fp32").splitlines()]
    assert per_parameter == [4.0, 4.0, 8.0, 16.0]
    for line in said(costs, "fp32-plan").splitlines():
        planned, there = numbers(line)
        assert planned == pytest.approx(there, rel=0.01)
    per_parameter = [numbers(line)[1] for line in said(costs, "mixed-code").splitlines()]
    assert per_parameter == [2.0, 2.0, 4.0, 8.0, 16.0]
    each, together = numbers(said(costs, "everyone-code"))[:2]
    assert together == pytest.approx(2 * each, abs=0.1)


def test_activations_grow_with_the_batch(costs: Any) -> None:
    rows = [numbers(line) for line in said(costs, "activations-code").splitlines()]
    assert len(rows) == 3
    assert all(row[1] == pytest.approx(rows[0][1], rel=0.02) for row in rows)
    planned, measured = numbers(said(costs, "logits"))[:2]
    assert planned == measured > 0


def test_sharding_by_formula_as_a_bar_and_measured(costs: Any) -> None:
    rows = [numbers(line) for line in said(costs, "sharding-table").splitlines()[1:]]
    gib = 1.3e9 / 2**30
    for n, row in zip((2, 8, 64), rows, strict=True):
        assert row == pytest.approx([16 * gib, (4 + 12 / n) * gib, (2 + 14 / n) * gib, 16 / n * gib], abs=0.06)
    assert shown(costs, "sharding-figure", "image/png")
    parts = [float(text) for text in re.findall(r"that is (\S+) of it", said(costs, "zero-1-code"))]
    assert sum(parts) == pytest.approx(1.0, abs=0.01)
    assert max(parts) < 0.6
