"""What a rank did when: the stamps of one replica as spans of time.

A step is one optimizer update; where no optimizer was seen, one reduction. Forward, backward, exposed communication,
optimizer and idle divide a step without gaps. Hidden communication runs beside them. Where stamps have the times of a
device, all times are that device's: see `device_clock.py`.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from paceline.device_clock import by_device
from paceline.trace import Moment, Stamp
from paceline.traffic import Collective, CollectiveKind

Interval = tuple[int, int]
Flights = list[tuple[Interval, int]]  # when, and of which bucket; -1 for parameters that are gathered


class SpanKind(Enum):
    """What a span of time was spent on."""

    FORWARD = "forward"
    BACKWARD = "backward"
    HIDDEN = "communication hidden"  # while autograd still made gradients, or before gathered parameters were needed
    EXPOSED = "communication exposed"  # after that: the rank could only wait
    OPTIMIZER = "optimizer"
    IDLE = "idle"  # none of these: data, loss, the user's own code


class Span(NamedTuple):
    """Nanoseconds of `time.perf_counter_ns`. `bucket` is -1 for what is not a bucket's communication."""

    kind: SpanKind
    begin_ns: int
    end_ns: int
    step: int
    bucket: int = -1


def read_timeline(stamps: Iterable[Stamp]) -> list[Span]:
    """The spans of every whole step, step by step, each step's by their begins.

    A step's number is that of its last reduction, so it is the same on all ranks; a step without one counts on.
    It begins where the step before ended.
    """
    found: list[Span] = []
    number, reached = 0, None
    in_order = sorted(by_device(stamps), key=lambda stamp: stamp.ns)
    under_way, waits = _gathers(in_order)
    for step in _steps(in_order):
        begin, end = step[0].ns if reached is None else reached, step[-1].ns
        number = max(number + 1, max(stamp.backward for stamp in step))
        gathered = _within(under_way, begin, end), _within(waits, begin, end)
        found += sorted(_spans(step, gathered, begin, end, number), key=lambda span: (span.begin_ns, span.end_ns))
        reached = end
    return found


def mean_ms(spans: Iterable[Span]) -> dict[str, float]:
    """Milliseconds per step of every kind, under its name, and of the whole "step"."""
    total = dict.fromkeys(SpanKind, 0)
    steps = set()
    for span in spans:
        total[span.kind] += span.end_ns - span.begin_ns
        steps.add(span.step)
    scale = 1e6 * max(1, len(steps))
    means = {kind.value: ns / scale for kind, ns in total.items()}
    return means | {"step": sum(ns for kind, ns in total.items() if kind is not SpanKind.HIDDEN) / scale}


def read_overlap(stamps: Sequence[Stamp]) -> dict[str, float]:
    """Of the last backward that was reduced: communication of its gradients, the exposed part, and the hidden share.

    Only buckets whose completion was seen count. No host sees that on a GPU, but the times of the device tell it.
    """
    known = by_device(stamps)
    last = max((_reduction(stamp) for stamp in known if stamp.moment is Moment.BACKWARD_END), default=None)
    seen = [stamp for stamp in known if _reduction(stamp) == last and stamp.moment is not Moment.WAIT_LEFT]
    hidden_ns, exposed_ns = (sum(end - begin for (begin, end), _ in flights) for flights in _communication(seen))
    whole_ns = hidden_ns + exposed_ns
    if not whole_ns:
        return {}
    return {
        "communication_s": whole_ns / 1e9,
        "exposed_communication_s": exposed_ns / 1e9,
        "overlap": 1 - exposed_ns / whole_ns,
    }


# ---- where steps end


def _steps(stamps: Sequence[Stamp]) -> list[list[Stamp]]:
    """The stamps of each step. What is left and was not reduced is not a step: an evaluation, or a step in progress."""
    found: list[list[Stamp]] = []
    step: list[Stamp] = []
    for stamp, following in pairwise([*stamps, None]):
        assert stamp is not None
        step.append(stamp)
        several = following is not None and following.moment in (Moment.OPTIMIZER_BEGIN, Moment.OPTIMIZER_END)
        if stamp.moment is Moment.OPTIMIZER_END and not several:
            found.append(step)
            step = []
    return found + _reductions(step)


def _reductions(stamps: Sequence[Stamp]) -> list[list[Stamp]]:
    found: list[list[Stamp]] = []
    step: list[Stamp] = []
    reduced = False
    for stamp in stamps:
        if reduced and stamp.moment in (Moment.FORWARD_BEGIN, Moment.BACKWARD_ENTERED, Moment.BACKWARD_BEGIN):
            found.append(step)
            step, reduced = [], False
        step.append(stamp)
        reduced = reduced or stamp.moment is Moment.BACKWARD_END
    return [*found, step] if reduced else found


# ---- what is in a step


def _reduction(stamp: Stamp) -> tuple[int, int]:
    """Which reduction it is of. Every generation of the group begins to count anew."""
    return stamp.generation, stamp.backward


def _spans(
    stamps: Sequence[Stamp], gathered: tuple[list[Interval], list[Interval]], begin: int, end: int, step: int
) -> list[Span]:
    hidden, exposed = _communication(stamps)
    under_way, waits = gathered
    if under_way or waits:  # whatever else flies meanwhile, while the rank waits it is exposed
        hidden = [(left, bucket) for flight, bucket in hidden for left in _minus([flight], waits)]
        exposed = _beside(exposed, waits)
        hidden = _beside(hidden, _minus(under_way, _merged(interval for interval, _ in exposed)))
    found = [Span(SpanKind.HIDDEN, *interval, step, bucket) for interval, bucket in hidden]
    found += [Span(SpanKind.EXPOSED, *interval, step, bucket) for interval, bucket in exposed]
    taken = _merged(interval for interval, _ in exposed)
    # Each kind has what those before it have left: waits are inside backward, a closure runs inside its optimizer.
    for kind, intervals in (
        (SpanKind.FORWARD, _pairs(stamps, Moment.FORWARD_BEGIN, Moment.FORWARD_END)),
        (SpanKind.BACKWARD, _pairs(stamps, Moment.BACKWARD_ENTERED, Moment.BACKWARD_LEFT) + _reduced(stamps)),
        (SpanKind.OPTIMIZER, _pairs(stamps, Moment.OPTIMIZER_BEGIN, Moment.OPTIMIZER_END)),
        (SpanKind.IDLE, [(begin, end)]),
    ):
        left = _minus(_merged(intervals), taken)
        found += [Span(kind, *interval, step) for interval in left]
        taken = _merged([*taken, *left])
    return found


def _communication(stamps: Sequence[Stamp]) -> tuple[Flights, Flights]:
    """Hidden and exposed. Of buckets in flight at the same time, the time belongs to the one that left first."""
    launched: dict[tuple[tuple[int, int], int], int] = {}
    landed: dict[tuple[tuple[int, int], int], int] = {}
    last_gradient: dict[tuple[int, int], int] = {}
    for stamp in stamps:
        reduction = _reduction(stamp)
        if stamp.moment is Moment.BACKWARD_END:
            last_gradient[reduction] = stamp.ns
        elif _is_gather(stamp):
            continue
        elif stamp.moment is Moment.LAUNCHED:
            launched.setdefault((reduction, stamp.bucket), stamp.ns)
        elif stamp.moment in (Moment.COMPLETED, Moment.WAIT_LEFT):
            which = reduction, stamp.bucket
            landed[which] = min(stamp.ns, landed.get(which, stamp.ns))
    hidden: Flights = []
    exposed: Flights = []
    reached = 0
    for (reduction, bucket), begin in sorted(launched.items(), key=lambda item: item[1]):
        begin, end = max(begin, reached), landed.get((reduction, bucket), 0)
        if end <= begin:
            continue
        # If it is missing, the ring buffer has dropped it together with everything before it.
        border = min(max(begin, last_gradient.get(reduction, begin)), end)
        hidden += [((begin, border), bucket)] if border > begin else []
        exposed += [((border, end), bucket)] if end > border else []
        reached = end
    return hidden, exposed


def _is_gather(stamp: Stamp) -> bool:
    return stamp.collective is not None and stamp.collective.kind is CollectiveKind.GATHER


def _gathers(stamps: Sequence[Stamp]) -> tuple[list[Interval], list[Interval]]:
    """When gathers of parameters were under way, as long as nobody needed them; and when somebody waited for them."""
    launched: dict[Collective, int] = {}
    landed: dict[Collective, int] = {}
    entered: dict[Collective, int] = {}
    under_way: list[Interval] = []
    waits: list[Interval] = []
    for stamp in stamps:
        if (which := stamp.collective) is None or not _is_gather(stamp):
            continue
        if stamp.moment is Moment.LAUNCHED:
            launched[which] = stamp.ns
        elif stamp.moment is Moment.COMPLETED:
            landed[which] = stamp.ns
        elif stamp.moment is Moment.WAIT_ENTERED:
            entered[which] = stamp.ns
        elif stamp.moment is Moment.WAIT_LEFT and which in entered:
            begin, end = entered.pop(which), stamp.ns
            under_way.append((launched.pop(which, begin), min(begin, landed.pop(which, begin))))
            waits.append((begin, end))
    return _merged(under_way), _merged(waits)


def _reduced(stamps: Sequence[Stamp]) -> list[Interval]:
    """From the first gradient of every backward that was reduced to its last wait."""
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for stamp in stamps:
        if stamp.moment is Moment.BACKWARD_BEGIN:
            begins[stamp.backward] = stamp.ns
        elif stamp.moment in (Moment.BACKWARD_END, Moment.WAIT_LEFT):
            ends[stamp.backward] = stamp.ns
    return [(begin, ends[backward]) for backward, begin in begins.items() if backward in ends]


def _pairs(stamps: Sequence[Stamp], opens: Moment, closes: Moment) -> list[Interval]:
    """Pairs may be nested. What was opened and ended with an exception is never closed, and does not count."""
    found: list[Interval] = []
    waiting: list[int] = []
    for stamp in stamps:
        if stamp.moment is opens:
            waiting.append(stamp.ns)
        elif stamp.moment is closes and waiting:
            found.append((waiting.pop(), stamp.ns))
    return found


# ---- intervals


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as sorted intervals without overlaps and without empty ones."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > begin:
            found.append((begin, end))
    return found


def _within(intervals: Iterable[Interval], begin: int, end: int) -> list[Interval]:
    return [(max(begin, one), min(end, other)) for one, other in intervals if max(begin, one) < min(end, other)]


def _beside(flights: Flights, intervals: Sequence[Interval]) -> Flights:
    """The flights, and what of `intervals` is in none of them."""
    rest = _minus(intervals, _merged(interval for interval, _ in flights))
    return [*flights, *((interval, -1) for interval in rest)]


def _minus(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """The parts of `intervals` that are not in `taken`; both must be merged."""
    found: list[Interval] = []
    for begin, end in intervals:
        for out, back in taken:
            if back <= begin:
                continue
            if out >= end:
                break
            if out > begin:
                found.append((begin, out))
            begin = back
        if end > begin:
            found.append((begin, end))
    return found
