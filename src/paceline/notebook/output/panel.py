"""The panel below a training cell: what each rank did, as HTML and as text.

Takes what `rank.rank_requests.collect` returned on each rank. Nothing is loaded from the network, and all text that
ranks sent is escaped.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from paceline.notebook.output.gantt import COLOURS, LABELS, gantt, show_ms
from paceline.observe.timeline import SpanKind as Kind

Replicas = Mapping[int, Mapping[str, Any]]

# The columns of the table, and the names of their means.
COLUMNS = {
    "step": "step",
    "forward": Kind.FORWARD.value,
    "backward": Kind.BACKWARD.value,
    "hidden": Kind.HIDDEN.value,
    "exposed": Kind.EXPOSED.value,
    "optimizer": Kind.OPTIMIZER.value,
    "other": Kind.IDLE.value,
}
LETTERS = {Kind.FORWARD: "f", Kind.BACKWARD: "b", Kind.EXPOSED: "!", Kind.OPTIMIZER: "o", Kind.IDLE: "."}
BAR = 40
CELL = 'style="text-align:right;padding:2px 10px"'
FIRST = 'style="text-align:left;padding:2px 10px 2px 0"'
ON_GPU = "Times are the host's: when kernels were launched and waited for."


def panel(timelines: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """A MIME bundle of HTML and text; empty when no rank has reduced gradients."""
    found = _sections(timelines)
    if not found:
        return {}
    named = len(found) > 1
    html = "\n".join(_html(name, replicas, named) for name, replicas in found)
    text = "\n\n".join(_text(name, replicas, named) for name, replicas in found)
    return {"text/html": f'<div class="paceline-panel">\n{html}\n</div>', "text/plain": text}


def _sections(timelines: Mapping[int, Mapping[str, Any]]) -> list[tuple[str, Replicas]]:
    """The replicas of all ranks, grouped by model: the n-th of each name. Ranks in order."""
    found: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = {}
    for rank, timeline in sorted(timelines.items()):
        seen: Counter[str] = Counter()
        for replica in timeline.get("replicas", ()):
            if replica["spans"]:
                found.setdefault((replica["module"], seen[replica["module"]]), {})[rank] = replica
            seen[replica["module"]] += 1
    return [(name, replicas) for (name, _), replicas in found.items()]


# ---- HTML


def _html(name: str, replicas: Replicas, named: bool) -> str:
    title = escape(f"{name}: {verdict(replicas)}" if named else verdict(replicas))
    on_gpu = any(not replica["device"].startswith("cpu") for replica in replicas.values())
    note = f'<div style="opacity:0.75;font-size:12px">{ON_GPU}</div>' if on_gpu else ""
    head = f"<div><b>{title}</b></div>"
    parts = (head, _legend(), gantt(replicas), _table(replicas), note)
    return "\n".join(['<div style="margin:4px 0 12px;padding:0 8px;line-height:1.4">', *parts, "</div>"])


def _legend() -> str:
    entries = [
        f'<span style="white-space:nowrap;margin-right:16px;display:inline-block">'
        f'<span style="display:inline-block;width:10px;height:10px;background:{COLOURS[kind]};margin-right:5px"></span>'
        f"{escape(LABELS[kind])}</span>"
        for kind in COLOURS
    ]
    return f'<div style="font-size:12px;margin-bottom:4px">{"".join(entries)}</div>'


def _table(replicas: Replicas) -> str:
    head, *rows = (
        "".join(f"<{tag} {CELL if place else FIRST}>{escape(text)}</{tag}>" for place, text in enumerate(row))
        for tag, row in [("th", [_counted(replicas), *COLUMNS]), *(("td", row) for row in _rows(replicas))]
    )
    return (
        f'<table style="font-size:12px;border-collapse:collapse;margin:4px 0 0"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"
    )


def _rows(replicas: Replicas) -> list[list[str]]:
    return [
        [f"rank {rank}", *(_number(replica["mean_ms"][mean]) for mean in COLUMNS.values())]
        for rank, replica in replicas.items()
    ]


def _counted(replicas: Replicas) -> str:
    steps = max(int(replica["steps"]) for replica in replicas.values())
    after = " after the first" if any(replica["after_first"] for replica in replicas.values()) else ""
    return f"mean of {steps} steps{after}, ms" if steps > 1 else f"one step{after}, ms"


def _number(ms: float) -> str:
    return f"{float(ms):.2f}" if ms < 9.95 else f"{float(ms):.1f}"


# ---- text


def _text(name: str, replicas: Replicas, named: bool) -> str:
    rows = _rows(replicas)
    widths = [max(map(len, column)) for column in zip(["", *COLUMNS], *rows, strict=True)]
    longest = max(replica["mean_ms"]["step"] for replica in replicas.values())
    bars = [_counted(replicas), *(_bar(replica["mean_ms"], longest) for replica in replicas.values())]
    lines = [f"{name}: {verdict(replicas)}" if named else verdict(replicas)]
    for bar, (rank, *numbers) in zip(bars, [["", *COLUMNS], *rows], strict=True):
        cells = "  ".join(text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True))
        lines.append(f"{rank:{widths[0]}}  {bar:{BAR}}  {cells}")
    letters = (f"{letter} {'other' if kind is Kind.IDLE else kind.value}" for kind, letter in LETTERS.items())
    return "\n".join([*lines, ", ".join(letters)])


def _bar(means: Mapping[str, float], longest: float) -> str:
    """A mean step in letters: as long as it is against the longest, each kind as long as its share."""
    bar, reached = "", 0.0
    for kind, letter in LETTERS.items():
        reached += means[kind.value]
        bar += letter * (round(BAR * reached / max(longest, 1e-9)) - len(bar))
    return bar


# A wait is worth mentioning from this share of a step on, and from this many milliseconds.
WORTH_SHARE, WORTH_MS = 0.05, 0.2
# A rank is called late when it is the last one in this share of the steps.
MOSTLY = 0.75

Replica = Mapping[str, Any]


def verdict(replicas: Mapping[int, Replica]) -> str:
    """Which rank is late, if one is; else how much of the communication is hidden. In one sentence."""
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
    # The table shows means over all steps; those examined here may be only the last ones.
    last_ones = "" if len(steps) == max(replica["steps"] for replica in replicas.values()) else "the last "
    when = "every step" if times == len(steps) and not last_ones else f"{times} of {last_ones}{len(steps)} steps"
    return f"rank {late} is late: {who} {longest} for it in {when}{_cause(late, replicas, max(more.values()))}"


def _cause(late: int, replicas: Mapping[int, Replica], wait: float) -> str:
    """What the late rank spends its time on, if one phase explains most of it."""
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


def _listed(ranks: Sequence[int]) -> str:
    *most, last = map(str, ranks)
    return f"{', '.join(most)} and {last}"
