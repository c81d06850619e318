"""What ranks report to each other, and what follows from it."""

import math
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import BackwardAborted, CollectiveMismatch
from paceline.layout import ParamMeta
from paceline.reducer.bucket import GradSlot
from paceline.reducer.report import (
    HEADER,
    Abort,
    Mode,
    StepReport,
    Vote,
)
from paceline.reducer.report_errors import aborted_error
from paceline.reducer.settle import check_together
from paceline.reducer.used_params import BITS, all_used, count_uses, used_bits

reports = st.builds(
    StepReport,
    reduction=st.integers(0, 2**62),
    unused=st.integers(0, 2**31),
    late=st.integers(0, 2**31),
    mode=st.sampled_from(Mode),
    weight=st.floats(allow_nan=False),
    abort=st.sampled_from(Abort),
    skipped=st.booleans(),
    votes=st.sampled_from([Vote.NOTHING, Vote.STOP, Vote.SAVE | Vote.EXHAUSTED]),
    launch_digest=st.integers(-(2**63), 2**63 - 1),
    used=st.lists(st.integers(0, 2**BITS - 1), max_size=4).map(tuple),
    lane_weights=st.lists(st.floats(allow_nan=False), max_size=9).map(tuple),
)


def plain(reduction: int = 7, mode: Mode = Mode.PLAIN, *, weight: float = 0.0, abort: Abort = Abort.NO) -> StepReport:
    return StepReport(reduction, unused=0, late=0, mode=mode, weight=weight, abort=abort)


@given(reports)
def test_reports_survive_the_wire(row: StepReport) -> None:
    encoded = torch.tensor(row.encode(), dtype=torch.int64)
    assert encoded.shape == (HEADER + len(row.used) + len(row.lane_weights),)
    assert StepReport.decode(encoded.tolist(), len(row.lane_weights)) == row


@given(reports)
def test_a_device_can_read_whether_gradients_are_to_be_used(row: StepReport) -> None:
    flag = torch.tensor(row.encode(), dtype=torch.int64).view(torch.float32)[0]
    assert flag.item() == float(row.abort is not Abort.NO or row.late > 0)


def test_a_weight_that_is_no_number_survives_too() -> None:
    assert math.isnan(StepReport.decode(plain(weight=math.nan).encode()).weight)


@given(st.lists(st.lists(st.booleans(), min_size=130, max_size=130), min_size=1, max_size=3))
def test_uses_are_counted_by_parameter(used: list[list[bool]]) -> None:
    rows = [replace(plain(), used=used_bits([slot_of(one) for one in row])) for row in used]
    assert count_uses(rows, 130) == [sum(column) for column in zip(*used, strict=True)]
    assert all_used(130) == used_bits([slot_of(True)] * 130)


def slot_of(used: bool) -> GradSlot:
    meta = ParamMeta("p", (1,), (1,), torch.float32, torch.device("cpu"))
    slot = GradSlot(0, meta, torch.zeros(1))
    slot.used = used
    return slot


def test_a_rank_that_ran_nothing_goes_with_either_kind() -> None:
    for mode in (Mode.PLAIN, Mode.WEIGHTED):
        check_together([plain(mode=mode), plain(mode=Mode.NOTHING)])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([plain(7), plain(8)], "different steps: rank 0: 7, rank 1: 8"),
        ([plain(mode=Mode.PLAIN), plain(mode=Mode.WEIGHTED)], "rank 0: PLAIN, rank 1: WEIGHTED"),
        ([plain(mode=Mode.MIXED), plain(mode=Mode.MIXED)], "rank 0: MIXED, rank 1: MIXED"),
        ([plain(mode=Mode.MIXED), plain(mode=Mode.NOTHING)], "inside weight"),
    ],
)
def test_reports_that_cannot_belong_together_are_refused(rows: list[StepReport], message: str) -> None:
    with pytest.raises(CollectiveMismatch, match=re.escape(message)):
        check_together(rows)


def test_an_aborted_rank_is_reported_before_anything_else() -> None:
    rows = [plain(7), plain(9, abort=Abort.EXCEPTION), plain(7, mode=Mode.MIXED, abort=Abort.EXCEPTION)]
    check_together(rows)
    error = aborted_error(rows)
    assert isinstance(error, BackwardAborted)
    assert error.ranks == (1, 2)
    assert "exception on rank 1, 2" in str(error)


@pytest.mark.parametrize(
    ("first", "then", "together"),
    [
        (Mode.NOTHING, Mode.PLAIN, Mode.PLAIN),
        (Mode.NOTHING, Mode.WEIGHTED, Mode.WEIGHTED),
        (Mode.PLAIN, Mode.PLAIN, Mode.PLAIN),
        (Mode.PLAIN, Mode.WEIGHTED, Mode.MIXED),
        (Mode.WEIGHTED, Mode.PLAIN, Mode.MIXED),
        (Mode.MIXED, Mode.PLAIN, Mode.MIXED),
    ],
)
def test_kinds_of_backwards_add_up(first: Mode, then: Mode, together: Mode) -> None:
    assert first.and_then(then) is together
