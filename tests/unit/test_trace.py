"""Stamps in a ring."""

from paceline.trace import Moment, Trace
from paceline.traffic import Collective, CollectiveKind


def test_stamps_are_kept_in_order() -> None:
    trace = Trace()
    trace.stamp(Moment.BACKWARD_BEGIN, 1)
    trace.stamp(Moment.READY, 1, 0)
    trace.stamp(Moment.LAUNCHED, 1, 0)
    stamps = trace.stamps()
    assert [(stamp.moment, stamp.backward, stamp.bucket) for stamp in stamps] == [
        (Moment.BACKWARD_BEGIN, 1, -1),
        (Moment.READY, 1, 0),
        (Moment.LAUNCHED, 1, 0),
    ]
    assert [stamp.ns for stamp in stamps] == sorted(stamp.ns for stamp in stamps)


def test_only_the_newest_are_kept() -> None:
    trace = Trace(capacity=3)
    for backward in range(5):
        trace.stamp(Moment.READY, backward)
    assert [stamp.backward for stamp in trace.stamps()] == [2, 3, 4]


def test_what_was_read_does_not_change() -> None:
    trace = Trace()
    trace.stamp(Moment.READY, 1)
    before = trace.stamps()
    trace.stamp(Moment.LAUNCHED, 1)
    assert len(before) == 1


def test_whole_steps_are_kept_however_many_buckets_there_are() -> None:
    buckets = 3000
    trace = Trace()
    in_backward = (Moment.READY, Moment.LAUNCHED, Moment.COMPLETED, Moment.WAIT_ENTERED, Moment.WAIT_LEFT)
    for backward in range(1, 8):
        trace.stamp(Moment.BACKWARD_BEGIN, backward)
        for moment in in_backward:
            for bucket in range(buckets):
                trace.stamp(moment, backward, bucket)
        trace.stamp(Moment.BACKWARD_END, backward)
    held = [stamp.backward for stamp in trace.stamps()]
    assert all(held.count(backward) == 5 * buckets + 2 for backward in (5, 6, 7))
    assert trace.forgets


def test_a_stamp_says_what_travels_and_in_which_generation() -> None:
    trace = Trace()
    sent = Collective(CollectiveKind.REDUCE_SCATTER, 1 << 20)
    trace.stamp(Moment.LAUNCHED, 1, 2, sent)
    trace.generation = 3
    trace.stamp(Moment.FORWARD_BEGIN, 1)
    launched, forward = trace.stamps()
    assert (launched.collective, launched.generation) == (sent, 0)
    assert (forward.collective, forward.generation, forward.bucket) == (None, 3, -1)
    assert str(sent) == "reduce-scatter, 1,048,576 bytes"
    assert str(Collective(CollectiveKind.GATHER, 12, "blocks.0")) == "gather of blocks.0, 12 bytes"
