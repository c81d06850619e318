"""Stamps in a ring."""

from paceline.trace import Moment, Trace


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
