"""What the timelines of all ranks say, in one sentence."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.observe.timeline import Kind

# A wait is worth a word from this part of a step on, and from this many milliseconds.
WORTH_SHARE, WORTH_MS = 0.05, 0.2
# A rank is called late when it is the last one in this share of the steps.
MOSTLY = 0.75

Replica = Mapping[str, Any]


def verdict(replicas: Mapping[int, Replica]) -> str:
    """Who is late, if someone is; else how much of the communication is hidden."""
    late = _late(replicas)
    if late is not None:
        return late
    hidden = _mean(replicas.values(), Kind.HIDDEN.value)
    exposed = _mean(replicas.values(), Kind.EXPOSED.value)
    if hidden + exposed == 0:
        alone = all(replica["size"] == 1 for replica in replicas.values())
        return "one rank: there is nothing to communicate" if alone else "nothing was communicated"
    whole = _mean(replicas.values(), "step")
    return (
        f"communication is {100 * hidden / (hidden + exposed):.0f} % hidden: a rank waits {show_ms(exposed)} in a step "
        f"of {show_ms(whole)}"
    )


def _late(replicas: Mapping[int, Replica]) -> str | None:
    """The rank that all others wait for waits least itself, in nearly every step."""
    waits = {rank: _waits(replica) for rank, replica in replicas.items()}
    steps = set.intersection(*(set(found) for found in waits.values())) if len(waits) > 1 else set()
    if len(steps) < 2:  # one step says nothing about the next
        return None
    last = Counter(min(waits, key=lambda rank: waits[rank][step]) for step in steps)
    late, times = last.most_common(1)[0]
    means = {rank: sum(found[step] for step in steps) / len(steps) for rank, found in waits.items()}
    more = {rank: mean - means[late] for rank, mean in means.items() if rank != late}
    whole = _mean(replicas.values(), "step")
    waiting = sorted(rank for rank, ms in more.items() if ms >= max(WORTH_MS, WORTH_SHARE * whole))
    if times < MOSTLY * len(steps) or not waiting:
        return None
    longest = show_ms(max(more.values()))
    who = f"rank {waiting[0]} waits" if len(waiting) == 1 else f"ranks {_listed(waiting)} wait up to"
    # The table tells means over all steps; those that are looked at here may be the last ones only.
    last_ones = "" if len(steps) == max(replica["steps"] for replica in replicas.values()) else "the last "
    when = "every step" if times == len(steps) and not last_ones else f"{times} of {last_ones}{len(steps)} steps"
    return f"rank {late} is late: {who} {longest} for it in {when}{_cause(late, replicas, max(more.values()))}"


def _cause(late: int, replicas: Mapping[int, Replica], wait: float) -> str:
    """What the late rank spends its time on, if one thing explains most of it."""
    others = [replica for rank, replica in replicas.items() if rank != late]
    longer = {
        kind: replicas[late]["mean_ms"][kind.value] - _mean(others, kind.value)
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.IDLE)
    }
    kind = max(longer, key=lambda kind: longer[kind])
    if longer[kind] < wait / 2:
        return ""
    if kind is Kind.IDLE:
        return f"; it spends {show_ms(longer[kind])} more outside forward, backward and optimizer"
    return f"; its {kind.value} takes {show_ms(longer[kind])} longer"


def _waits(replica: Replica) -> dict[int, float]:
    """Exposed milliseconds of every step that is shown."""
    found: dict[int, float] = {}
    for kind, begin, end, step, _ in replica["spans"]:
        found[step] = found.get(step, 0.0) + (end - begin) / 1e6 * (kind == Kind.EXPOSED.value)
    return found


def _mean(replicas: Sequence[Replica] | Any, name: str) -> float:
    values = [float(replica["mean_ms"][name]) for replica in replicas]
    return sum(values) / len(values)


def show_ms(ms: float) -> str:
    """Three digits at most."""
    if ms >= 99.5:
        return f"{ms:,.0f} ms"
    return f"{ms:.1f} ms" if ms >= 9.95 else f"{ms:.2f} ms"


def _listed(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    return f"{', '.join(most)} and {last}"
