"""The plan of a transformer by its numbers: sums that can be checked, verdicts, bad input."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.collectives.choose import CHOICES
from paceline.memory_plan.closed_form import PlanSettings, guess, usual_heads
from paceline.memory_plan.numbers import PlanError, parse_bytes, parse_count, parse_list, show_bytes
from paceline.memory_plan.rank_memory import largest_that
from paceline.memory_plan.result import MemoryPlan, Traffic
from paceline.memory_plan.setup import OPTIMIZERS, PLACEMENTS, PRECISIONS, TRANSPORTS, TrainingSetup
from paceline.placement import PLACEMENTS as LIBRARY
from paceline.reducer.lanes import Lanes

GIB = 2**30


def gpt2(**changed: Any) -> MemoryPlan:
    usual = {"params": 124e6, "batch": 8, "seq": 1024, "vocab": 50304, "dtype": "float32", "ranks": 1}
    return PlanSettings(**{**usual, **changed}).plan()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", "parameters 4 + gradients 4 + m 4 + v 4 = 16 bytes per parameter"),
        ("bf16", "parameters 4 + gradients 4 + m 4 + v 4 = 16 bytes per parameter"),
        ("bf16-master", "parameters 2 + gradients 2 + master 4 + m 4 + v 4 = 16 bytes per parameter"),
        ("bf16-pure", "parameters 2 + gradients 2 + m 2 + v 2 = 8 bytes per parameter"),
    ],
)
def test_the_states_are_a_sum_that_can_be_checked(dtype: str, expected: str) -> None:
    assert TrainingSetup(dtype=dtype, optimizer="adamw").convention.startswith(expected)
    plan = gpt2(dtype=dtype, batch=1, seq=8)
    update = next(moment for moment in plan.by_ranks[0].moments if moment.name == "optimizer step")
    states = [line for line in update.lines if line.name in ("parameters", "gradients", "master", "m", "v")]
    per_parameter = int(expected.split(" = ")[1].split()[0])
    assert sum(line.nbytes for line in states) == per_parameter * 124_000_000


def test_gpt2_is_what_torch_counts() -> None:
    """9010 MiB with autocast, 10803 MiB in float32: torch's own tracker on fake tensors, without workspaces."""
    shape = {"params": 124_475_904, "layers": 12, "width": 768, "heads": 12, "device": "cuda", "update": "fused"}
    for dtype, mib in (("bf16", 9010), ("float32", 10803)):
        total = gpt2(dtype=dtype, **shape).total / 2**20 - 64
        assert total == pytest.approx(mib, rel=0.002)


@pytest.mark.parametrize("dtype", list(PRECISIONS))
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_lines_add_up_and_the_table_says_so(dtype: str, optimizer: str, device: str) -> None:
    plan = gpt2(dtype=dtype, optimizer=optimizer, device=device, ranks=(1, 2, 8))
    for item in plan.by_ranks:
        assert item.total == sum(line.nbytes for line in item.peak.lines) == max(m.total for m in item.moments)
        assert len({line.name for line in item.peak.lines}) == len(item.peak.lines)
    text = str(plan)
    assert plan.convention in text
    assert show_bytes(plan.total) in text
    json.dumps(plan.to_json())


def test_more_of_anything_takes_no_less() -> None:
    assert gpt2(batch=16).total > gpt2(batch=8).total
    assert gpt2(seq=2048).total > gpt2(seq=1024).total
    assert gpt2(ranks=2).total > gpt2(ranks=1).total
    assert gpt2(accumulate=2).total > gpt2(accumulate=1).total
    assert gpt2(checkpointing=True).total < gpt2().total
    small = {"batch": 1, "seq": 8}
    assert gpt2(update="foreach", **small).total > gpt2(update="fused", **small).total


@pytest.mark.parametrize(
    ("params", "layers", "width"), [(124e6, 12, 768), (6.7e9, 32, 4096), (774e6, 36, 1280), (354e6, 24, 1024)]
)
def test_a_guess_has_about_the_right_number_of_parameters(params: float, layers: int, width: int) -> None:
    depth, guessed = guess(int(params), 1024, 50304)
    assert 12 * depth * guessed**2 + (50304 + 1024) * guessed == pytest.approx(params, rel=0.05)
    # What matters for activations is depth times width.
    assert 0.7 < depth * guessed / (layers * width) < 1.4


def test_given_shapes_are_not_guessed() -> None:
    plan = gpt2(layers=12, width=768, heads=12)
    assert not plan.notes
    assert "guessed" in gpt2(layers=12).notes[0]


@pytest.mark.parametrize("heads", [5, 7, 12, 25])
def test_a_guessed_width_suits_the_heads_and_guessed_heads_the_width(heads: int) -> None:
    _, width = guess(124_000_000, 1024, 50304, heads=heads)
    assert width % heads == 0
    assert width % usual_heads(width) == 0
    assert usual_heads(1000) == 10
    assert usual_heads(768) == 12


def held(plan: MemoryPlan, ranks: int) -> dict[str, int]:
    """What a rank holds when backward has ended, by line."""
    update = next(moment for moment in plan.at(ranks).moments if moment.name == "optimizer step")
    return {line.name: line.nbytes for line in update.lines}


@pytest.mark.parametrize(
    ("placement", "whole", "cut", "words"),
    [
        ("ddp", 16, 0, "= 16 bytes"),
        ("zero1", 4, 12, "parameters 2 + gradients 2 + (master 4 + m 4 + v 4) / N = 4 + 12 / N bytes"),
        ("zero2", 2, 14, "parameters 2 + (gradients 2 + master 4 + m 4 + v 4) / N = 2 + 14 / N bytes"),
        ("zero3", 0, 16, "(parameters 2 + gradients 2 + master 4 + m 4 + v 4) / N = 16 / N bytes"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_per_parameter_of_a_placement(placement: str, whole: int, cut: int, words: str, ranks: int) -> None:
    plan = gpt2(dtype="bf16-master", placement=placement, ranks=(1, ranks))
    assert words in plan.convention
    lines = held(plan, ranks)
    states = sum(lines[name] for name in ("parameters", "gradients", "master", "m", "v"))
    assert states == whole * 124_000_000 + cut * 124_000_000 // ranks
    parts = 1 if placement == "ddp" else ranks
    assert lines["gradients in float32"] == 4 * 124_000_000 // parts
    if placement in ("zero2", "zero3"):
        assert lines["gradient buckets"] % 2 == 0 and lines["gradient buckets"] > 0
    assert sum(held(plan, 1)[name] for name in ("parameters", "gradients", "master", "m", "v")) == 16 * 124_000_000


def test_parameters_in_shards_are_gathered_by_unit() -> None:
    plan = gpt2(dtype="bf16-master", placement="zero3", ranks=4, layers=12, width=768, heads=12)
    root, unit = 124_000_000 - 12 * 12 * 768**2, 12 * 768**2
    backward = {line.name: line.nbytes for line in plan.by_ranks[0].moments[0].lines}
    assert backward["gathered parameters"] == 2 * (root + 2 * unit)
    assert backward["unit fetched ahead"] == 2 * unit + 2 * unit // 4
    assert held(plan, 4)["gradient buckets"] == 2 * (root + unit)
    starts = [
        {
            moment.name: moment
            for moment in gpt2(dtype="bf16-master", placement="zero3", ranks=4, meta=meta).at(4).moments
        }
        for meta in (False, True)
    ]
    assert "wrapping the model" in starts[0] and "wrapping the model" not in starts[1]


def test_each_placement_needs_less_than_the_one_before() -> None:
    totals = [gpt2(placement=name, ranks=8, batch=1, seq=64).total for name in PLACEMENTS]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 4


def test_the_names_of_transports_are_those_of_the_library() -> None:
    assert TRANSPORTS == CHOICES


def test_the_names_of_placements_are_those_of_the_library() -> None:
    assert tuple(LIBRARY) == PLACEMENTS


def test_what_would_fit_is_said() -> None:
    asked = {"params": "5.5B", "dtype": "bf16-master", "batch": 1, "device_memory": "70GiB"}
    plan = gpt2(**asked, ranks=2)
    assert not plan.fits()
    first = str(plan).splitlines()[0]
    assert first.startswith("2 ranks: each does NOT fit in 70 GiB") and "would fit: zero" in first, first
    name = plan.by_ranks[0].instead[0].split(" on ")[0]
    assert gpt2(**asked, ranks=2, placement=name).fits()
    alone = gpt2(**asked, ranks=1).by_ranks[0]
    assert len(alone.instead) == 1 and " ranks (" in alone.instead[0]
    assert "nor would another placement" in str(gpt2(device_memory="1GiB", batch=64))


def test_traffic_of_placements() -> None:
    size = 4 * 124_000_000  # of gradients, and of parameters
    sent = {name: gpt2(placement=name, ranks=4).at(4).traffic.sent_bytes for name in PLACEMENTS}
    assert sent == {"ddp": size * 3 // 2, "zero1": size * 3 // 2, "zero2": size * 3 // 2, "zero3": 3 * size * 3 // 4}
    zero1 = gpt2(placement="zero1", ranks=4, link_gbit=400, tflops=1).at(4).traffic
    assert zero1.in_forward_bytes == size * 3 // 4 and zero1.link_bytes_per_s is not None
    last = zero1.last_bucket_bytes / zero1.link_bytes_per_s
    assert zero1.exposed_s == pytest.approx(last), "the gather after the update is hidden behind forward"
    fast = gpt2(placement="zero1", ranks=4, link_gbit=400, tflops=10_000).at(4).traffic
    assert fast.exposed_s is not None and fast.seconds is not None and fast.backward_s is not None
    assert fast.exposed_s == pytest.approx(fast.seconds - 1.5 * fast.backward_s), "but for what takes longer"


def test_shards_over_some_of_the_ranks() -> None:
    size = 4 * 124_000_000
    for placement in ("zero1", "zero2", "zero3"):
        over_two, of_two = gpt2(placement=placement, ranks=8, shard=2), gpt2(placement=placement, ranks=2)
        assert held(over_two, 8) == held(of_two, 2), "what a rank keeps follows from the ranks that share"
        assert held(gpt2(placement=placement, ranks=8, shard=8), 8) == held(gpt2(placement=placement, ranks=8), 8)
        gathered = (3 if placement == "zero3" else 2) * size // 2
        assert over_two.at(8).traffic.sent_bytes == gathered + 2 * size * 3 // 4 // 2
    assert " / 2 bytes" in over_two.convention
    assert gpt2(placement="zero2", ranks=4, shard=1).total == gpt2(ranks=4).total


def test_copies_are_shards_over_fewer_ranks_and_their_cost_is_said() -> None:
    for placement in ("zero1", "zero2", "zero3"):
        twice, in_fours = (gpt2(placement=placement, ranks=8, **how) for how in ({"copies": 2}, {"shard": 4}))
        assert twice.at(8).moments == in_fours.at(8).moments
        assert twice.at(8).traffic == in_fours.at(8).traffic
        once = gpt2(placement=placement, ranks=8)
        (cost,) = (note for note in twice.notes if "held by" in note)
        assert cost.startswith("8 ranks: each shard is held by 2 of them")
        assert show_bytes(twice.total - once.total) in cost
        assert twice.total > once.total
        assert not [note for note in once.notes if "held by" in note]
    assert "/ (N / 2) bytes" in gpt2(placement="zero2", ranks=8, copies=2).convention
    assert gpt2(placement="zero2", ranks="1,2,4", copies=2).at(2).total == gpt2(ranks=2).total


@pytest.mark.parametrize("placement", ["zero1", "zero2", "zero3"])
def test_what_is_exchanged_over_gloo_needs_memory_of_its_own(placement: str) -> None:
    """Beside what it needs where ranks read in each other's memory."""
    asked: dict[str, Any] = {"placement": placement, "ranks": 2, "device": "cpu", "batch": 1, "seq": 64}
    shared, gloo = gpt2(**asked), gpt2(**asked, transport="torch")
    assert gpt2(**asked, transport="shm").total == shared.total
    assert gpt2(**{**asked, "placement": "ddp"}, transport="torch").total == gpt2(**{**asked, "placement": "ddp"}).total
    moments = {moment.name: {line.name: line.nbytes for line in moment.lines} for moment in gloo.at(2).moments}
    assert not any("staging in shared memory" in lines for lines in moments.values())
    size = 4 * 124_000_000
    if placement == "zero3":
        root = {line.name: line.nbytes for line in shared.at(2).peak.lines}["gathered parameters"]
        assert (
            moments["gather of the root"]["root on its way"] == 2 * moments["gather of the root"]["gathered parameters"]
        )
        assert moments["gather of the root"]["gathered parameters"] < root
    else:
        assert moments["gather after the update"]["parameters on their way"] == 2 * size
        assert moments["gather after the update"]["kept for gathers"] == 16 * 2**20
    if placement == "zero1":
        assert moments["last buckets under way"]["copies of buckets under way"] == 2 * size
    assert gloo.total > shared.total


def test_the_type_in_which_gradients_are_summed_is_counted() -> None:
    asked = {"dtype": "bf16-master", "ranks": 4, "batch": 1, "seq": 8}
    plain, wide = gpt2(**asked), gpt2(**asked, reduce_dtype="float32")
    assert wide.at(4).traffic.sent_bytes == 2 * plain.at(4).traffic.sent_bytes
    under_way = [{line.name: line.nbytes for line in moment.lines} for moment in wide.at(4).moments]
    assert max(lines.get("copies of buckets under way", 0) for lines in under_way) == 4 * 124_000_000
    assert not any("under way" in moment.name for moment in plain.at(4).moments)


def test_master_weights_may_be_asked_for_by_name() -> None:
    asked = gpt2(dtype="bf16-pure", master="float32")
    assert (asked.total, asked.convention) == (gpt2(dtype="bf16-master").total, gpt2(dtype="bf16-master").convention)
    assert gpt2(master="float32").total == gpt2().total, "parameters in float32 are their own master"


def test_a_device_too_small_is_an_error_with_what_would_fit() -> None:
    plan = gpt2(params="5.5B", dtype="bf16-master", batch=1, ranks=2, device_memory="70GiB")
    with pytest.raises(PlanError, match="does NOT fit in 70 GiB: .* would fit: zero"):
        plan.check_fits()
    plan.check_fits(200 * GIB)


def test_the_largest_batch_fits_and_the_next_does_not() -> None:
    plan = gpt2(device_memory=24 * GIB, ranks=(1, 2))
    for item in plan.by_ranks:
        largest = item.largest_batch
        assert largest is not None and largest > 1
        assert gpt2(batch=largest, ranks=item.ranks).fits(24 * GIB)
        assert not gpt2(batch=largest + 1, ranks=item.ranks).fits(24 * GIB)
    assert f"largest batch {plan.largest_batch}" in str(plan)
    assert gpt2(device_memory=GIB).largest_batch == 0
    assert "does NOT fit" in str(gpt2(device_memory=GIB))


def test_the_verdict_comes_first() -> None:
    first, second, empty = str(gpt2(device_memory="24GiB", ranks="1,2,4")).splitlines()[:3]
    assert first.startswith("1 rank: fits in 24 GiB: ") and second.startswith("2 and 4 ranks: each fits in 24 GiB: ")
    assert not empty
    assert str(gpt2(device_memory=GIB)).startswith("1 rank: does NOT fit in 1 GiB: ")
    assert str(gpt2()).startswith("1 rank: needs ")


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 1000])
def test_bisection(limit: int) -> None:
    assert largest_that(lambda batch: batch <= limit) == limit
    assert largest_that(lambda _: False) == 0


def test_traffic_is_that_of_a_ring() -> None:
    plan = gpt2(ranks=(1, 2, 4))
    gradients = 4 * 124_000_000
    assert [item.traffic.sent_bytes for item in plan.by_ranks] == [0, gradients, gradients * 3 // 2]
    assert plan.by_ranks[0].traffic.exposed_s == 0
    assert plan.by_ranks[1].traffic.exposed_s is None
    assert "unknown" in str(plan)


def test_what_backward_hides() -> None:
    hidden = Traffic(1000, last_bucket_bytes=10, link_bytes_per_s=1000.0, backward_s=5.0)
    assert hidden.seconds == 1.0
    assert hidden.exposed_s == pytest.approx(0.01)
    assert Traffic(1000, 10, 1000.0, 0.25).exposed_s == pytest.approx(0.75)
    assert "hidden behind backward" in str(gpt2(ranks=2, link_gbit=400, tflops=1))
    assert "exposed" in str(gpt2(ranks=2, link_gbit=1, tflops=400))
    assert "unknown without its duration" in str(gpt2(ranks=2, link_gbit=1))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"optimizer": "adan"}, "optimizer='adan': expected one of adamw, adam, sgd"),
        ({"dtype": "fp8"}, "dtype='fp8': expected one of float32, bf16, bf16-master, bf16-pure"),
        ({"device": "tpu"}, "device='tpu': expected one of cpu, cuda"),
        ({"placement": "zero4"}, "placement='zero4': expected one of ddp, zero1, zero2, zero3"),
        (
            {"placement": "zero3", "lanes": 8, "ranks": 3},
            "lanes=8 with placement='zero3': expected a multiple of 3 ranks",
        ),
        ({"placement": "zero1", "shard": 2, "ranks": 3}, "shard=2: expected a divisor of the number of ranks, 3"),
        ({"shard": 2}, "shard=2: placement='ddp' makes no shards"),
        ({"placement": "zero1", "copies": 2, "ranks": 3}, "copies=2: expected a divisor of the number of ranks, 3"),
        ({"copies": 2}, "copies=2: placement='ddp' makes no shards"),
        ({"placement": "zero1", "copies": 2, "shard": 2}, "shard=2 and copies=2 say the same in two ways"),
        ({"transport": "mpi"}, "transport='mpi': expected one of auto, torch, shm, two-level"),
        ({"transport": "shm", "device": "cuda"}, "transport='shm': device='cuda' shares no memory"),
        ({"reduce_dtype": "int8"}, "reduce_dtype='int8': expected one of float32, bfloat16, float16"),
        ({"params": -5}, "params=-5: expected a whole number, at least 1"),
        ({"params": float("nan")}, "params=nan"),
        ({"batch": 0}, "batch=0: expected a whole number, at least 1"),
        ({"batch": 1.5}, "batch=1.5"),
        ({"batch": True}, "batch=True"),
        ({"seq": -1}, "seq=-1"),
        ({"vocab": 0}, "vocab=0"),
        ({"layers": 0}, "layers=0"),
        ({"width": -1}, "width=-1"),
        ({"heads": 0}, "heads=0: expected a whole number, at least 1"),
        ({"width": 768, "heads": 7}, "heads=7: expected a number that divides width=768"),
        ({"heads": 99_999}, "heads=99999: no width up to 32768 is a multiple"),
        ({"params": 1e6}, "params=1000000: expected more than the 3,219,456 that vocab=50304 × width=64 takes"),
        (
            {"width": 1536, "untied": True},
            "expected more than the 154,533,888 that vocab=50304 × width=1536, twice, takes",
        ),
        ({"layers": 96, "width": 768}, "params=124000000: expected about the 718,110,720 that layers=96 of width=768"),
        ({"batch": 10**400}, "expected a whole number, at least 1 and at most 10^18"),
        ({"ranks": (1, 0)}, "ranks=0"),
        ({"ranks": ()}, "ranks=()"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"device_memory": -1}, "device_memory=-1"),
        ({"link_gbit": 0.0}, "link_gbit=0.0: expected a number above 0"),
        ({"tflops": -2.0}, "tflops=-2.0"),
        ({"optimizer": "rmsprop", "update": "fused"}, "rmsprop has no fused step"),
    ],
)
def test_bad_input_names_the_field_and_what_it_accepts(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        gpt2(**changed)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_count, "124M", 124_000_000),
        (parse_count, "1.3b", 1_300_000_000),
        (parse_count, "124439808", 124_439_808),
        (parse_bytes, "24GiB", 24 * GIB),
        (parse_bytes, "80 GB", 80_000_000_000),
        (parse_list, "1, 2,4", (1, 2, 4)),
    ],
)
def test_numbers_as_people_write_them(parse: Callable[[str, str], Any], text: str, value: Any) -> None:
    assert parse("field", text) == value


@pytest.mark.parametrize("parse", [parse_count, parse_bytes, parse_list])
@pytest.mark.parametrize("text", ["", "x", "-1", "12Q", "1e", "0"])
def test_numbers_nobody_understands(parse: Callable[[str, str], Any], text: str) -> None:
    with pytest.raises(PlanError, match="field="):
        parse("field", text)


def test_plan_against_measured() -> None:
    plan = gpt2(ranks=(1, 2))
    assert "the plan is +5.0%" in plan.against(int(plan.total / 1.05))
    text = plan.against(plan.total, ranks=2)
    assert "planned" in text and "measured" in text and show_bytes(plan.at(2).total) in text
    with pytest.raises(PlanError, match="measured_bytes=0"):
        plan.against(0)
    with pytest.raises(PlanError, match="ranks=3: this plan was made for 1, 2"):
        plan.at(3)
    with pytest.raises(PlanError, match="device_bytes"):
        plan.fits()


@pytest.mark.parametrize(("lanes", "ranks"), [(8, 1), (8, 2), (8, 3), (8, 8), (6, 1), (7, 2), (64, 3), (1, 1)])
def test_sums_of_lanes_are_planned_as_they_are_folded(lanes: int, ranks: int) -> None:
    held = 0
    for rank in range(ranks):
        folds = Lanes(lanes, rank, ranks)
        for lane in folds.mine:
            folds.open(lane)
            if lane != folds.mine[-1]:
                folds.fold(0, torch.zeros(1))
            folds.close(1.0)
            held = max(held, len(folds._sums.get(0, ())))
    assert TrainingSetup(ranks=(ranks,), lanes=lanes).lane_copies(ranks) == held
    plain, planned = (gpt2(ranks=ranks, lanes=given).total for given in (None, lanes))
    assert planned - plain >= held * 4 * 124e6


def test_fewer_lanes_than_ranks_cannot_be_planned() -> None:
    with pytest.raises(PlanError, match="lanes=2: expected at least one for each of 4 ranks"):
        gpt2(ranks=[1, 4], lanes=2)
