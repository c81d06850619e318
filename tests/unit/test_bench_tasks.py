"""The pieces that workers are made of."""

from typing import Any

import pytest
import torch

from paceline.bench.contenders import ContenderName
from paceline.bench.contenders.ours import wrapper_arguments
from paceline.bench.contenders.trainee import BuildContext
from paceline.bench.spec import StepSpec
from paceline.bench.tasks.timed_steps import _group_steps
from paceline.replica.agreement import Agreement


def test_steps_are_timed_one_by_one_or_a_burst_at_once() -> None:
    numbers = range(10, 14)
    assert [list(turn) for turn in _group_steps(numbers, 1)] == [[10], [11], [12], [13]]
    assert [list(turn) for turn in _group_steps(numbers, 3)] == [[10], [11, 12, 13]]
    assert [list(turn) for turn in _group_steps(numbers, 4)] == [[10, 11, 12, 13]]
    assert [list(turn) for turn in _group_steps(numbers, 0)] == [[10], [11], [12], [13]]


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("paceline:overlap=false", {"overlap": False}),
        ("paceline-torch", {"transport": "torch"}),
        ("lanes", {"lanes": 8, "seed": 3}),
        ("lanes-torch", {"lanes": 8, "seed": 3, "transport": "torch"}),
        ("agreement", {"agreement": Agreement(state_every=64, not_finite="skip")}),
        ("agreement:state_every=1", {"agreement": Agreement(state_every=1, not_finite="skip")}),
        ("no-agreement", {"agreement": Agreement(state_every=0, not_finite="keep")}),
        ("lanes-audited:audit_every=3", {"lanes": 8, "seed": 3, "agreement": Agreement(audit_every=3)}),
    ],
)
def test_what_the_model_is_wrapped_with_follows_from_the_name(label: str, expected: dict[str, Any]) -> None:
    name = ContenderName.parse(label)
    spec = StepSpec(ranks=2, accumulate=4, seed=3)
    context = BuildContext(spec, name.name, dict(name.arguments), 0, 2, torch.device("cpu"))
    assert wrapper_arguments(context) == expected
