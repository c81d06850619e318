"""How much communication a step hides, from the stamps of a replica's trace."""

from collections.abc import Sequence

from paceline.trace import Moment, Stamp


def read_overlap(stamps: Sequence[Stamp]) -> dict[str, float]:
    """Of the last backward that was reduced: communication, its exposed part, and the hidden share.

    Communication is the time during which at least one bucket was between launch and completion. It is exposed from
    the moment at which autograd had produced its last gradient.
    """
    last = max((stamp.backward for stamp in stamps if stamp.moment is Moment.BACKWARD_END), default=None)
    if last is None:
        return {}
    launched: dict[int, int] = {}
    completed: dict[int, int] = {}
    ends = {Moment.BACKWARD_END: 0, Moment.WAIT_LEFT: 0}
    for stamp in stamps:
        if stamp.backward != last:
            continue
        if stamp.moment is Moment.LAUNCHED:
            launched.setdefault(stamp.bucket, stamp.ns)
        elif stamp.moment is Moment.COMPLETED:
            completed.setdefault(stamp.bucket, stamp.ns)
        elif stamp.moment in ends:
            ends[stamp.moment] = max(ends[stamp.moment], stamp.ns)
    spans = sorted((begin, completed[bucket]) for bucket, begin in launched.items() if bucket in completed)
    busy = _union(spans)
    if not busy:
        return {}
    exposed = _union([(max(begin, ends[Moment.BACKWARD_END]), end) for begin, end in spans])
    return {
        "communication_s": busy / 1e9,
        "exposed_communication_s": exposed / 1e9,
        "overlap": 1 - exposed / busy,
    }


def _union(spans: Sequence[tuple[int, int]]) -> int:
    """Time covered by spans that are sorted by their begins."""
    covered, reached = 0, 0
    for begin, end in spans:
        begin = max(begin, reached)
        if end > begin:
            covered += end - begin
            reached = end
    return covered
