"""What is settled from reports on the device equals what the host makes of them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from paceline.collectives.local import LocalTransport
from paceline.layout import BucketCaps, ParamMeta, plan_layout
from paceline.reducer.buckets import BucketSet
from paceline.reducer.report import Mode, StepReport
from paceline.reducer.settle import _factor
from paceline.reducer.settle_late import settle_on_device
from paceline.reducer.step import Division

PLAIN = StepReport(1, unused=0, late=0, mode=Mode.PLAIN, weight=0.0)
NOTHING = replace(PLAIN, mode=Mode.NOTHING, skipped=True)


def weighted(weight: float) -> StepReport:
    return replace(PLAIN, mode=Mode.WEIGHTED, weight=weight)


def lanes(mode: Mode, *weights: float) -> StepReport:
    return replace(PLAIN, mode=mode, lane_weights=weights)


def settled(rows: list[StepReport], division: Division) -> float:
    """By what the gradients in a bucket are multiplied."""
    params = [nn.Parameter(torch.zeros(3))]
    metas = [ParamMeta("p", (3,), (1,), torch.float32, torch.device("cpu"), False)]
    buckets = BucketSet(params, plan_layout(metas, [0], BucketCaps.from_mib(25, None)))
    buckets.allocate(LocalTransport())
    buckets.buckets[0].flat.fill_(1.0)
    gathered = torch.tensor([row.encode() for row in rows], dtype=torch.int64)
    settle_on_device(gathered, buckets, division, len(rows[0].lane_weights))
    return float(buckets.buckets[0].flat[0])


CASES = {
    "weights": [weighted(3.0), weighted(5.0)],
    "a rank that skipped its batch has no weight, but the others have": [NOTHING, weighted(5.0)],
    "the same seen from the other rank": [weighted(5.0), NOTHING],
    "no tokens at all": [weighted(0.0), weighted(0.0)],
    "lanes": [lanes(Mode.PLAIN, 1.0, 0.0), lanes(Mode.PLAIN, 0.0, 1.0)],
    "weighted lanes": [lanes(Mode.WEIGHTED, 3.0, 0.0), lanes(Mode.WEIGHTED, 0.0, 5.0)],
    "a rank whose lanes were all skipped": [lanes(Mode.NOTHING, 0.0, 0.0), lanes(Mode.WEIGHTED, 0.0, 5.0)],
    "no lane that counts": [lanes(Mode.NOTHING, 0.0, 0.0), lanes(Mode.NOTHING, 0.0, 0.0)],
}


@pytest.mark.parametrize("by_reduction", [True, False])
@pytest.mark.parametrize("rows", CASES.values(), ids=CASES)
def test_the_device_divides_as_the_host_does(rows: list[StepReport], by_reduction: bool) -> None:
    division = Division(by_reduction, len(rows), float(len(rows)))
    assert settled(rows, division) == pytest.approx(_factor(rows, division))


def test_plain_gradients_stay_as_they_are_beside_a_loss_that_touched_no_parameter() -> None:
    rows = [PLAIN, replace(PLAIN, mode=Mode.NOTHING)]
    assert settled(rows, Division(True, 2, 2.0)) == 1.0
