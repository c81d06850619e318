"""The pieces that workers are made of."""

import socket
from typing import Any

import pytest
import torch

from paceline.bench.contenders import ContenderName
from paceline.bench.contenders.ours import wrapped_with
from paceline.bench.contenders.trainee import Place
from paceline.bench.spec import StepSpec
from paceline.bench.tasks.step import _turns
from paceline.bench.wire import HungUp, Line
from paceline.replica.agreement import Agreement


def test_steps_are_timed_one_by_one_or_a_burst_at_once() -> None:
    numbers = range(10, 14)
    assert [list(turn) for turn in _turns(numbers, 1)] == [[10], [11], [12], [13]]
    assert [list(turn) for turn in _turns(numbers, 3)] == [[10], [11, 12, 13]]
    assert [list(turn) for turn in _turns(numbers, 4)] == [[10, 11, 12, 13]]
    assert [list(turn) for turn in _turns(numbers, 0)] == [[10], [11], [12], [13]]


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
    ],
)
def test_what_the_model_is_wrapped_with_follows_from_the_name(label: str, expected: dict[str, Any]) -> None:
    name = ContenderName.parse(label)
    spec = StepSpec(ranks=2, accumulate=4, seed=3)
    place = Place(spec, name.name, dict(name.arguments), 0, 2, torch.device("cpu"))
    assert wrapped_with(place) == expected


def test_messages_cross_whole_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, receiver = Line(ours), Line(theirs)
        messages: list[dict[str, Any]] = [{"text": "é\n" * 100}, {"numbers": [1.5, None]}, {}]
        for message in messages:
            sender.send(message)
        assert receiver.receive(5.0) == messages[0]
        assert receiver.has_more()
        assert [receiver.receive(5.0), receiver.receive(5.0)] == messages[1:]
        assert not receiver.has_more()
        with pytest.raises(TimeoutError):
            receiver.receive(0.01)


def test_a_closed_line_is_noticed_on_both_sides() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.close()
        with pytest.raises(HungUp):
            Line(ours).receive(5.0)
        with pytest.raises(HungUp):
            Line(ours).send({"a": 1})
