"""What the replicas of this rank did in the last cell, for the panel."""

import sys
from typing import TYPE_CHECKING, Any

from paceline.observe.timeline import mean_ms, read_timeline
from paceline.trace import Moment

if TYPE_CHECKING:
    from paceline.reducer.reducer import Reducer

SHOWN_STEPS = 8
FIRST = 1  # reduction


def collect(since_ns: int) -> dict[str, Any]:
    """Of every replica of this process that has reduced since then: the spans of its last steps, and means over all.

    A replica's very first step, in which it lays out its buckets, is left out when there are others.

    Times are those of `time.perf_counter_ns`, which on Linux is CLOCK_MONOTONIC: they compare between the processes
    of one machine. On a GPU they are the host's: when kernels were launched and waited for.
    """
    if "paceline.replica.guard" not in sys.modules:
        return {"replicas": []}
    from paceline.replica.guard import live_replicas

    found = [_read(type(module).__name__, reducer, since_ns) for module, reducer in live_replicas()]
    return {"replicas": [replica for replica in found if replica is not None]}


def _read(name: str, reducer: "Reducer", since_ns: int) -> dict[str, Any] | None:
    stamps = reducer.trace.stamps()
    recent = [stamp for stamp in stamps if stamp.ns >= since_ns]
    if not any(stamp.moment is Moment.BACKWARD_END for stamp in recent):
        return None
    spans = read_timeline(recent)
    steps = list(dict.fromkeys(span.step for span in spans))
    is_partial = reducer.trace.forgets and len(recent) == len(stamps)  # the begin of the first step may be lost
    has_first = any(stamp.moment is Moment.BACKWARD_BEGIN and stamp.backward == FIRST for stamp in recent)
    leaves_out = len(steps) > 1 and (is_partial or has_first)
    if leaves_out:
        del steps[0]
        spans = [span for span in spans if span.step in steps]
    shown = set(steps[-SHOWN_STEPS:])
    return {
        "module": name,
        "device": str(reducer.set.layout.params[0].device),
        "size": reducer.transport.size,
        "steps": len(steps),
        "after_first": leaves_out and has_first,
        "mean_ms": mean_ms(spans),
        "spans": [[span.kind.value, *span[1:]] for span in spans if span.step in shown],
    }
