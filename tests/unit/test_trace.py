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
