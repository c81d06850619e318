"""The pieces that workers are made of."""

import socket
from typing import Any

import pytest

from paceline.bench.memory import PeakMemory
from paceline.bench.tasks.step import _turns
from paceline.bench.wire import HungUp, Line

MIB = 1 << 20


def test_steps_are_timed_one_by_one_or_a_burst_at_once() -> None:
    numbers = range(10, 14)
    assert [list(turn) for turn in _turns(numbers, 1)] == [[10], [11], [12], [13]]
    assert [list(turn) for turn in _turns(numbers, 3)] == [[10], [11, 12, 13]]
    assert [list(turn) for turn in _turns(numbers, 4)] == [[10, 11, 12, 13]]
    assert [list(turn) for turn in _turns(numbers, 0)] == [[10], [11], [12], [13]]


def test_the_peak_is_remembered_until_it_is_to_be_forgotten() -> None:
    memory = PeakMemory()
    block = b"x" * (64 * MIB)
    del block
    assert 60 * MIB < memory.peak() < 100 * MIB
    memory.forget_peak()
    assert memory.peak() < 30 * MIB


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
