"""What a rank did when, read from stamps."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.device_clock import DeviceClock, DeviceMoment
from paceline.observe.timeline import Span, SpanKind, mean_ms, read_overlap, read_timeline
from paceline.trace import Moment, Stamp, Trace
from paceline.traffic import Collective, CollectiveKind

M = Moment
TILES = [kind for kind in SpanKind if kind is not SpanKind.HIDDEN]

Told = tuple[int, Moment, int] | tuple[int, Moment, int, int]


def stamps(*told: Told) -> list[Stamp]:
    return [Stamp(*(one if len(one) == 4 else (*one, -1))) for one in told]


def shown(spans: Sequence[Span]) -> list[tuple[str, int, int]]:
    return [(span.kind.name.lower(), span.begin_ns, span.end_ns) for span in spans]


def step(at: int, number: int) -> list[Stamp]:
    """100 ns: two buckets, of which one ends before the last gradient and one after it."""
    moments: list[Told] = [
        (0, M.FORWARD_BEGIN, number - 1),
        (20, M.FORWARD_END, number - 1),
        (25, M.BACKWARD_ENTERED, number - 1),
        (30, M.BACKWARD_BEGIN, number),
        (32, M.READY, number, 0),
        (32, M.LAUNCHED, number, 0),
        (40, M.COMPLETED, number, 0),
        (45, M.LAUNCHED, number, 1),
        (60, M.BACKWARD_END, number),
        (61, M.WAIT_ENTERED, number, 0),
        (61, M.WAIT_LEFT, number, 0),
        (61, M.WAIT_ENTERED, number, 1),
        (75, M.COMPLETED, number, 1),
        (76, M.WAIT_LEFT, number, 1),
        (80, M.BACKWARD_LEFT, number),
        (85, M.OPTIMIZER_BEGIN, number),
        (100, M.OPTIMIZER_END, number),
    ]
    return [stamp._replace(ns=stamp.ns + at) for stamp in stamps(*moments)]


def test_a_step_is_divided() -> None:
    spans = read_timeline(step(0, 1))
    assert shown([span for span in spans if span.kind is not SpanKind.HIDDEN]) == [
        ("forward", 0, 20),
        ("idle", 20, 25),
        ("backward", 25, 60),
        ("exposed", 60, 75),
        ("backward", 75, 80),
        ("idle", 80, 85),
        ("optimizer", 85, 100),
    ]
    assert [span for span in spans if span.kind is SpanKind.HIDDEN] == [
        Span(SpanKind.HIDDEN, 32, 40, 1, 0),
        Span(SpanKind.HIDDEN, 45, 60, 1, 1),
    ]
    assert {span.step for span in spans} == {1}


def test_a_step_begins_where_the_one_before_ended() -> None:
    spans = read_timeline(step(0, 1) + step(130, 2))
    assert shown([span for span in spans if span.step == 2][:2]) == [("idle", 100, 130), ("forward", 130, 150)]


def test_means() -> None:
    means = mean_ms(read_timeline(step(0, 1) + step(130, 2)))
    assert means["forward"] == pytest.approx(20e-6)
    assert means["communication hidden"] == pytest.approx(23e-6)
    assert means["communication exposed"] == pytest.approx(15e-6)
    assert means["idle"] == pytest.approx(25e-6)  # 10 in the first, 40 in the second
    assert means["step"] == pytest.approx(115e-6)
    assert mean_ms([])["step"] == 0.0


def test_buckets_in_flight_at_the_same_time_count_once_for_the_first() -> None:
    spans = read_timeline(
        stamps(
            (0, M.BACKWARD_BEGIN, 1),
            (10, M.LAUNCHED, 1, 0),
            (15, M.LAUNCHED, 1, 1),
            (30, M.COMPLETED, 1, 0),
            (40, M.COMPLETED, 1, 1),
            (50, M.BACKWARD_END, 1),
        )
    )
    assert spans == [
        Span(SpanKind.BACKWARD, 0, 50, 1),
        Span(SpanKind.HIDDEN, 10, 30, 1, 0),
        Span(SpanKind.HIDDEN, 30, 40, 1, 1),
    ]


def test_micros_that_are_not_reduced_belong_to_the_step_that_is() -> None:
    microbatches: list[Told] = []
    for at in (0, 50):
        microbatches += [(at, M.FORWARD_BEGIN, 4), (at + 10, M.FORWARD_END, 4)]
        microbatches += [(at + 12, M.BACKWARD_ENTERED, 4), (at + 40, M.BACKWARD_LEFT, 4)]
    spans = read_timeline(stamps(*microbatches) + step(100, 5))
    assert {span.step for span in spans} == {5}
    assert len([span for span in spans if span.kind is SpanKind.FORWARD]) == 3
    backward = [(span.begin_ns, span.end_ns) for span in spans if span.kind is SpanKind.BACKWARD]
    assert backward == [(12, 40), (62, 90), (125, 160), (175, 180)]


BLOCK = Collective(CollectiveKind.GATHER, 64, "block")


def of_gather(*moments: tuple[int, Moment]) -> list[Stamp]:
    return [Stamp(ns, moment, 1, -1, BLOCK) for ns, moment in moments]


def communication(spans: Sequence[Span]) -> list[tuple[str, int, int, int]]:
    kinds = {SpanKind.HIDDEN: "hidden", SpanKind.EXPOSED: "exposed"}
    return [(kinds[s.kind], s.begin_ns, s.end_ns, s.bucket) for s in spans if s.kind in kinds]


def test_a_gather_is_hidden_until_its_parameters_are_needed() -> None:
    gather = of_gather((2, M.LAUNCHED), (10, M.WAIT_ENTERED), (14, M.WAIT_LEFT))
    spans = read_timeline(gather + step(0, 1))
    assert communication(spans)[:2] == [("hidden", 2, 10, -1), ("exposed", 10, 14, -1)]
    forward = [(span.begin_ns, span.end_ns) for span in spans if span.kind is SpanKind.FORWARD]
    assert forward == [(0, 10), (14, 20)], "and the module did not run meanwhile"


def test_a_gather_may_fly_from_one_step_into_the_next() -> None:
    gather = of_gather((90, M.LAUNCHED), (140, M.WAIT_ENTERED), (145, M.WAIT_LEFT))
    spans = read_timeline(step(0, 1) + gather + step(130, 2))
    ours = [(span.step, kind, a, b) for span in spans for kind, a, b, n in communication([span]) if n == -1]
    assert ours == [(1, "hidden", 90, 100), (2, "hidden", 100, 140), (2, "exposed", 140, 145)]


def test_while_a_rank_waits_for_parameters_nothing_is_hidden() -> None:
    gather = of_gather((33, M.LAUNCHED), (35, M.WAIT_ENTERED), (50, M.WAIT_LEFT))  # buckets fly till 40, and from 45 on
    spans = read_timeline(gather + step(0, 1))
    assert communication(spans) == [
        ("hidden", 32, 35, 0),
        ("exposed", 35, 50, -1),
        ("hidden", 50, 60, 1),
        ("exposed", 60, 75, 1),
    ]


def test_a_gather_that_was_over_early_was_not_under_way_any_more() -> None:
    gather = of_gather((2, M.LAUNCHED), (5, M.COMPLETED), (10, M.WAIT_ENTERED), (10, M.WAIT_LEFT))
    assert communication(read_timeline(gather + step(0, 1)))[0] == ("hidden", 2, 5, -1)


def test_overlap_is_that_of_gradients() -> None:
    gather = of_gather((33, M.LAUNCHED), (35, M.WAIT_ENTERED), (50, M.WAIT_LEFT))
    assert read_overlap(gather + step(0, 1)) == read_overlap(step(0, 1))


def test_every_generation_counts_its_backwards_anew() -> None:
    old = [stamp._replace(backward=stamp.backward + 8) for stamp in step(0, 1)]
    new = [stamp._replace(generation=1, ns=stamp.ns + 200) for stamp in step(0, 1) if stamp.moment is not M.COMPLETED]
    new.append(Stamp(259, M.COMPLETED, 1, 1, None, 1))
    found = read_overlap(old + new)
    assert found["communication_s"] == pytest.approx(14e-9)
    assert found["overlap"] == 1.0


def on_device(stamp: Stamp, ns: int | None) -> Stamp:
    """One of a device: when it came by, or that it has not."""
    moment = DeviceMoment(DeviceClock(Never()), Never())
    moment.known_ns = ns
    return stamp._replace(device=moment)


class Never:
    """A device that comes to nothing."""

    def captures(self) -> bool:
        return False

    def here(self) -> None:
        return None

    def after(self, work: object) -> None:
        return None

    def query(self) -> bool:
        return False

    def elapsed_time(self, end_event: object) -> float:
        raise AssertionError


def test_a_devices_times_take_the_place_of_the_hosts() -> None:
    """The host has queued a whole step before the device begins with it."""
    queued = [on_device(stamp._replace(ns=number), stamp.ns + 1000) for number, stamp in enumerate(step(0, 1))]
    spans = read_timeline(queued)
    assert shown(spans) == [(kind, a + 1000, b + 1000) for kind, a, b in shown(read_timeline(step(0, 1)))]
    assert read_overlap(queued) == read_overlap(step(0, 1))


def test_a_step_that_the_device_has_not_completed_is_none() -> None:
    done = [on_device(stamp, stamp.ns) for stamp in step(0, 1)]
    begun = [on_device(stamp, stamp.ns if stamp.ns < 161 else None) for stamp in step(100, 2)]
    assert {span.step for span in read_timeline(done + begun)} == {1}
    assert read_overlap(done + begun) == read_overlap(step(0, 1))


def test_without_an_optimizer_a_reduction_is_a_step_and_a_rest_is_none() -> None:
    bare = [stamp for number in (1, 2) for stamp in step(100 * number, number) if "optimizer" not in stamp.moment.value]
    evaluation = stamps((400, M.FORWARD_BEGIN, 2), (450, M.FORWARD_END, 2))
    spans = read_timeline(bare + evaluation)
    assert [span.step for span in spans if span.kind is SpanKind.FORWARD] == [1, 2]
    assert max(span.end_ns for span in spans) == 280
    assert read_timeline(evaluation) == []


def test_steps_that_were_not_reduced_count_on() -> None:
    local = [
        one
        for at in (0, 20)
        for one in stamps((at, M.FORWARD_BEGIN, 7), (at + 5, M.FORWARD_END, 7))
        + stamps((at + 8, M.OPTIMIZER_BEGIN, 7), (at + 10, M.OPTIMIZER_END, 7))
    ]
    assert sorted({span.step for span in read_timeline(local)}) == [7, 8]


def test_several_optimizers_step_once_and_one_may_run_inside_another() -> None:
    outer = stamps(
        (200, M.OPTIMIZER_BEGIN, 1), (210, M.OPTIMIZER_BEGIN, 1), (220, M.OPTIMIZER_END, 1), (230, M.OPTIMIZER_END, 1)
    )
    spans = read_timeline(step(0, 1) + outer)
    assert {span.step for span in spans} == {1}
    assert shown(spans)[-3:] == [("optimizer", 85, 100), ("idle", 100, 200), ("optimizer", 200, 230)]


def test_a_closure_runs_inside_its_optimizer() -> None:
    inside = [stamp for stamp in step(10, 1) if "optimizer" not in stamp.moment.value]
    spans = read_timeline(stamps((0, M.OPTIMIZER_BEGIN, 0)) + inside + stamps((120, M.OPTIMIZER_END, 1)))
    assert [(a, b) for kind, a, b in shown(spans) if kind == "optimizer"] == [(0, 10), (30, 35), (90, 120)]


def test_what_ended_with_an_exception_does_not_count() -> None:
    failed = stamps((0, M.FORWARD_BEGIN, 0), (5, M.OPTIMIZER_BEGIN, 0))
    spans = read_timeline(failed + step(50, 1))
    assert shown(spans)[:2] == [("idle", 0, 50), ("forward", 50, 70)]
    assert len([span for span in spans if span.kind is SpanKind.OPTIMIZER]) == 1


def test_hidden_and_exposed_are_what_read_overlap_says() -> None:
    means, overlap = mean_ms(read_timeline(step(0, 1))), read_overlap(step(0, 1))
    assert means["communication exposed"] / 1e3 == pytest.approx(overlap["exposed_communication_s"])
    both = means["communication hidden"] + means["communication exposed"]
    assert both / 1e3 == pytest.approx(overlap["communication_s"])


@st.composite
def steps(draw: st.DrawFn) -> list[Stamp]:
    """Steps as a reducer stamps them, with any times, microbatches and buckets."""
    trace: list[Stamp] = []
    now, number = draw(st.integers(0, 100)), draw(st.integers(0, 5))

    def stamp(moment: Moment, bucket: int = -1) -> None:
        nonlocal now
        now += draw(st.integers(0, 20))
        trace.append(Stamp(now, moment, number, bucket))

    for _ in range(draw(st.integers(0, 4))):
        microbatches, buckets = draw(st.integers(1, 3)), draw(st.integers(0, 4))
        for microbatch in range(microbatches):
            stamp(M.FORWARD_BEGIN)
            stamp(M.FORWARD_END)
            stamp(M.BACKWARD_ENTERED)
            if microbatch == microbatches - 1:
                number += 1
                early = draw(st.integers(0, buckets))
                stamp(M.BACKWARD_BEGIN)
                for bucket in range(early):
                    stamp(M.LAUNCHED, bucket)
                seen = draw(st.integers(0, early))
                for bucket in range(seen):
                    stamp(M.COMPLETED, bucket)
                stamp(M.BACKWARD_END)
                for bucket in range(early, buckets):
                    stamp(M.LAUNCHED, bucket)
                for bucket in range(buckets):
                    stamp(M.WAIT_ENTERED, bucket)
                    if bucket >= seen:
                        stamp(M.COMPLETED, bucket)
                    stamp(M.WAIT_LEFT, bucket)
            stamp(M.BACKWARD_LEFT)
        for _ in range(draw(st.integers(0, 2))):
            stamp(M.OPTIMIZER_BEGIN)
            stamp(M.OPTIMIZER_END)
    return trace


@st.composite
def cut(draw: st.DrawFn) -> list[Stamp]:
    """As a ring buffer holds them: the begin is lost."""
    trace = draw(steps())
    return trace[draw(st.integers(0, len(trace))) :]


collectives = st.sampled_from([None, BLOCK, BLOCK._replace(of="other"), Collective(CollectiveKind.ALL_REDUCE, 8)])
anything = st.lists(
    st.builds(Stamp, st.integers(0, 200), st.sampled_from(Moment), st.integers(0, 3), st.integers(-1, 3), collectives),
    max_size=40,
)


@settings(max_examples=200)
@given(st.one_of(steps(), cut(), anything))
def test_spans_divide_every_step(trace: list[Stamp]) -> None:
    spans = read_timeline(trace)
    assert all(span.begin_ns < span.end_ns for span in spans)
    reached = None
    for number in dict.fromkeys(span.step for span in spans):
        mine = [span for span in spans if span.step == number]
        tiles = sorted((span.begin_ns, span.end_ns) for span in mine if span.kind in TILES)
        for begin, end in tiles:  # no gap, no overlap, also between steps
            assert reached in (None, begin)
            reached = end
        beside = sorted((span.begin_ns, span.end_ns) for span in mine if span.kind is SpanKind.HIDDEN)
        assert all(one[1] <= other[0] for one, other in pairwise(beside))
        assert all(tiles[0][0] <= begin and end <= tiles[-1][1] for begin, end in beside)


@settings(max_examples=200)
@given(steps())
def test_hidden_and_exposed_are_all_communication(trace: list[Stamp]) -> None:
    """Against a count of every nanosecond in which a bucket flew, and whether the last gradient was there."""
    flown: dict[int, bool] = {}
    for begin in (stamp for stamp in trace if stamp.moment is M.LAUNCHED):
        key = (begin.backward, begin.bucket)
        ends = [s.ns for s in trace if s.moment in (M.COMPLETED, M.WAIT_LEFT) and (s.backward, s.bucket) == key]
        (last,) = [s.ns for s in trace if s.moment is M.BACKWARD_END and s.backward == begin.backward]
        flown |= {ns: ns >= last for ns in range(begin.ns, min(ends))}
    spans = read_timeline(trace)
    for kind, late in ((SpanKind.HIDDEN, False), (SpanKind.EXPOSED, True)):
        counted = sum(span.end_ns - span.begin_ns for span in spans if span.kind is kind)
        assert counted == sum(is_late is late for is_late in flown.values())


def test_what_a_ring_buffer_holds_of_a_step_without_its_last_gradient_was_exposed() -> None:
    lost = [stamp for stamp in step(0, 1) if stamp.ns > 60] + step(100, 2)
    launched = stamps((60, M.LAUNCHED, 1, 1))
    assert shown([span for span in read_timeline(launched + lost) if span.step == 1])[0] == ("exposed", 60, 75)


def test_a_full_trace_says_that_it_forgets() -> None:
    trace = Trace(capacity=2)
    trace.stamp(M.READY, 1)
    assert not trace.forgets
    trace.stamp(M.READY, 1)
    assert trace.forgets


# ---- overlap


def of_backward_5(*moments: tuple[int, Moment, int]) -> list[Stamp]:
    return [Stamp(ns, moment, 5, bucket) for ns, moment, bucket in moments]


def test_a_bucket_that_ends_before_backward_is_hidden() -> None:
    found = read_overlap(
        of_backward_5(
            (0, Moment.BACKWARD_BEGIN, -1),
            (10, Moment.LAUNCHED, 0),
            (30, Moment.COMPLETED, 0),
            (50, Moment.LAUNCHED, 1),
            (60, Moment.BACKWARD_END, -1),
            (80, Moment.COMPLETED, 1),
            (80, Moment.WAIT_LEFT, 1),
        )
    )
    assert found["communication_s"] == pytest.approx(50e-9)
    assert found["exposed_communication_s"] == pytest.approx(20e-9)
    assert found["overlap"] == pytest.approx(0.6)


def test_buckets_in_flight_at_the_same_time_count_once() -> None:
    found = read_overlap(
        of_backward_5(
            (0, Moment.LAUNCHED, 0),
            (10, Moment.LAUNCHED, 1),
            (40, Moment.COMPLETED, 0),
            (60, Moment.COMPLETED, 1),
            (60, Moment.BACKWARD_END, -1),
        )
    )
    assert found["communication_s"] == pytest.approx(60e-9)
    assert found["overlap"] == 1.0


def test_only_the_last_backward_counts() -> None:
    old = [Stamp(1, Moment.LAUNCHED, 4, 0), Stamp(2, Moment.COMPLETED, 4, 0), Stamp(1, Moment.BACKWARD_END, 4, -1)]
    new = of_backward_5((10, Moment.BACKWARD_END, -1), (10, Moment.LAUNCHED, 0), (20, Moment.COMPLETED, 0))
    assert read_overlap(old + new)["overlap"] == 0.0


def test_nothing_to_read() -> None:
    assert read_overlap([]) == {}
    assert read_overlap(of_backward_5((1, Moment.BACKWARD_END, -1))) == {}
