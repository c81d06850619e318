"""A plan as text. Needs no torch."""

from collections.abc import Callable, Sequence

from paceline.memory_plan.numbers import show_bytes, show_seconds
from paceline.memory_plan.value import MemoryPlan, RankPlan


def render(plan: MemoryPlan) -> str:
    """The table, the verdicts, the notes."""
    return "\n".join(
        [
            plan.subject,
            plan.convention,
            "",
            *_table(plan),
            "",
            *(f"{name}: {text}" for name, text in verdicts(plan)),
            *plan.notes,
        ]
    )


def _table(plan: MemoryPlan) -> list[str]:
    header = ["one rank, at its highest", *(_world(item.ranks) for item in plan.by_ranks), "how"]
    rows = [[name, *(_cell(item, name) for item in plan.by_ranks), formula] for name, formula in _names(plan.by_ranks)]
    meaning = "what the process grows by" if plan.device == "cpu" else "what torch's allocator hands out"
    total = ["total", *(show_bytes(item.total) for item in plan.by_ranks), meaning]
    outside = [
        [line.name, *(_outside_cell(item, line.name) for item in plan.by_ranks), line.formula]
        for line in max((item.outside for item in plan.by_ranks), key=len)
    ]
    whole = ["with what lies outside", *(show_bytes(item.total_with_outside) for item in plan.by_ranks), ""]
    return layout([header, None, *rows, None, total, *outside, whole])


def layout(rows: Sequence[Sequence[str] | None]) -> list[str]:
    """Columns of equal width: names and explanations to the left, figures to the right. None is a rule."""
    cells = [row for row in rows if row is not None]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    last = len(widths) - 1
    text = []
    for row in rows:
        if row is None:
            text.append("  ".join("-" * width for width in widths))
            continue
        padded = [
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        text.append("  ".join(padded).rstrip())
    return text


def _names(plans: Sequence[RankPlan]) -> list[tuple[str, str]]:
    """Every line that some world has, once, with its formula; with all of them where worlds differ."""
    found: dict[str, dict[str, str]] = {}
    for item in plans:
        for line in item.peak.lines:
            worlds = found.setdefault(line.name, {})
            worlds.setdefault(line.formula, _world(item.ranks))
    rows = []
    for name, formulas in found.items():
        differ = len(formulas) > 1
        rows.append((name, "; ".join(f"{world}: {text}" if differ else text for text, world in formulas.items())))
    return rows


def _cell(plan: RankPlan, name: str) -> str:
    for line in plan.peak.lines:
        if line.name == name:
            return show_bytes(line.nbytes)
    return "–"


def _outside_cell(plan: RankPlan, name: str) -> str:
    return next((show_bytes(line.nbytes) for line in plan.outside if line.name == name), "–")


def _world(ranks: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def verdicts(plan: MemoryPlan) -> list[tuple[str, str]]:
    """What follows from the figures, as (question, answer)."""
    found = _grouped(plan, "highest at", _moments)
    if plan.device_bytes is not None:
        found += _grouped(plan, f"on {show_bytes(plan.device_bytes)}", lambda item: _fit(item, plan))
    for item in plan.by_ranks:
        if item.ranks > 1:
            found.append((f"sent per step by each of {item.ranks} ranks", traffic_words(item)))
    return found


def _grouped(plan: MemoryPlan, question: str, answer: Callable[[RankPlan], str]) -> list[tuple[str, str]]:
    """Worlds with the same answer share a line."""
    worlds: dict[str, list[int]] = {}
    for item in plan.by_ranks:
        worlds.setdefault(answer(item), []).append(item.ranks)
    if len(plan.by_ranks) == 1:
        return [(question, text) for text in worlds]
    return [(f"{_joined(ranks)}, {question}", text) for text, ranks in worlds.items()]


def _joined(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:-1])) + " and " + _world(ranks[-1]) if len(ranks) > 1 else _world(ranks[0])


def _moments(item: RankPlan) -> str:
    others = [moment for moment in item.moments if moment is not item.peak]
    beside = "; ".join(f"{moment.name} {show_bytes(moment.total)}" for moment in others)
    return f"{item.peak.name}, {show_bytes(item.total)}" + (f" ({beside})" if beside else "")


def _fit(item: RankPlan, plan: MemoryPlan) -> str:
    assert plan.device_bytes is not None
    left = plan.device_bytes - item.total_with_outside
    answer = f"fits, {show_bytes(left)} left" if left >= 0 else f"does NOT fit, {show_bytes(-left)} too much"
    if item.largest_batch is None:
        return answer
    if item.largest_batch == 0:
        return f"{answer}; not even a batch of 1 fits"
    power = 1 << (item.largest_batch.bit_length() - 1)
    return f"{answer}; largest batch {item.largest_batch}, as a power of two {power}"


def traffic_words(item: RankPlan) -> str:
    """`475 MiB = 2·(2 − 1)/2 × gradients, 40 ms on the link: hidden behind backward but for 2 ms`."""
    traffic = item.traffic
    text = f"{show_bytes(traffic.sent_bytes)} = 2·({item.ranks} − 1)/{item.ranks} × gradients"
    if traffic.seconds is None:
        return f"{text}; whether backward hides it is unknown without the link's speed"
    text += f", {show_seconds(traffic.seconds)} on the link"
    exposed = traffic.exposed_s
    if exposed is None or traffic.backward_s is None:
        return f"{text}; whether backward hides it is unknown without its duration"
    if traffic.seconds <= traffic.backward_s:
        return f"{text}: hidden behind backward ({show_seconds(traffic.backward_s)}) but for {show_seconds(exposed)}"
    return f"{text}: longer than backward ({show_seconds(traffic.backward_s)}), {show_seconds(exposed)} exposed"
