"""A plan as text: the verdict first, then the table behind it. Needs no torch."""

from collections.abc import Callable, Sequence

from paceline.memory_plan.numbers import PlanError, show_bytes, show_seconds
from paceline.memory_plan.result import MemoryPlan, RankPlan


def render(plan: MemoryPlan) -> str:
    """The verdict, the table, and what else follows from the figures."""
    sent = [
        f"sent per step by each of {item.ranks} ranks: {_traffic(item)}" for item in plan.by_ranks if item.ranks > 1
    ]
    return "\n".join(
        [
            *verdict(plan, plan.device_bytes),
            "",
            plan.subject,
            plan.convention,
            "",
            *_table(plan),
            "",
            *_grouped(plan, "highest at", _moments),
            *sent,
            *plan.notes,
        ]
    )


def verdict(plan: MemoryPlan, device_bytes: int | None) -> list[str]:
    """Whether the ranks fit on such a device, and what would if they do not."""
    return _grouped(plan, "", lambda item: _verdict(item, device_bytes))


def against(plan: MemoryPlan, measured_bytes: int, *, ranks: int | None = None) -> str:
    """Plan against measurement, for one world size: the lines of the plan, then both totals."""
    if measured_bytes <= 0:
        raise PlanError(f"measured_bytes={measured_bytes}: expected a number above 0")
    chosen = plan.by_ranks[0] if ranks is None else plan.at(ranks)
    rows = [[line.name, show_bytes(line.nbytes), line.formula] for line in chosen.peak.lines]
    total = ["planned", show_bytes(chosen.total), f"at its highest: {chosen.peak.name}"]
    found = ["measured", show_bytes(measured_bytes), f"the plan is {chosen.total / measured_bytes - 1:+.1%}"]
    return "\n".join(aligned([["memory of one rank", "bytes", "how"], None, *rows, None, total, found], left=(0, 2)))


def _table(plan: MemoryPlan) -> list[str]:
    header = ["one rank, at its highest", *(_world(item.ranks) for item in plan.by_ranks), "how"]
    inside = [{line.name: line.nbytes for line in item.peak.lines} for item in plan.by_ranks]
    outside = [{line.name: line.nbytes for line in item.outside} for item in plan.by_ranks]
    formulas = {line.name: line.formula for item in plan.by_ranks for line in item.outside}
    meaning = "what the process grows by" if plan.device == "cpu" else "what torch's allocator hands out"
    return aligned(
        [
            header,
            None,
            *([name, *_cells(inside, name), formula] for name, formula in _formulas(plan.by_ranks)),
            None,
            ["total", *(show_bytes(item.total) for item in plan.by_ranks), meaning],
            *([name, *_cells(outside, name), formula] for name, formula in formulas.items()),
            ["with memory outside torch", *(show_bytes(item.total_with_outside) for item in plan.by_ranks), ""],
        ],
        left=(0, len(header) - 1),
    )


def _cells(worlds: Sequence[dict[str, int]], name: str) -> list[str]:
    return [show_bytes(world[name]) if name in world else "–" for world in worlds]


def _formulas(plans: Sequence[RankPlan]) -> list[tuple[str, str]]:
    """Each line of any world once, with its formula, or with the formula of each world where they differ."""
    found: dict[str, dict[str, str]] = {}
    for item in plans:
        for line in item.peak.lines:
            found.setdefault(line.name, {}).setdefault(line.formula, _world(item.ranks))
    rows = []
    for name, formulas in found.items():
        differ = len(formulas) > 1
        rows.append((name, "; ".join(f"{world}: {text}" if differ else text for text, world in formulas.items())))
    return rows


def aligned(rows: Sequence[Sequence[str] | None], left: Sequence[int] = (0,)) -> list[str]:
    """Lines with columns of equal width. Names stand to the left, in the columns `left`, figures to the right. None is
    a rule."""
    cells = [row for row in rows if row is not None]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text = []
    for row in rows:
        padded = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row or ["-" * width for width in widths], widths, strict=True))
        ]
        text.append("  ".join(padded).rstrip())
    return text


def _world(ranks: int) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def _grouped(plan: MemoryPlan, question: str, answer: Callable[[RankPlan], str]) -> list[str]:
    """One line per answer; worlds with the same answer share a line."""
    worlds: dict[str, list[int]] = {}
    for item in plan.by_ranks:
        worlds.setdefault(answer(item), []).append(item.ranks)
    lines = []
    for text, ranks in worlds.items():
        several = ", ".join(map(str, ranks[:-1])) + " and " if len(ranks) > 1 else ""
        lines.append(f"{several}{_world(ranks[-1])}{', ' if question else ''}{question}: {text}")
    return lines


def _verdict(item: RankPlan, device_bytes: int | None) -> str:
    needed = show_bytes(item.total_with_outside)
    each = "each " if item.ranks > 1 else ""
    if device_bytes is None:
        return f"{each}needs {needed}"
    left = device_bytes - item.total_with_outside
    verdict = "fits" if left >= 0 else "does NOT fit"
    answer = f"{each}{verdict} in {show_bytes(device_bytes)}: {needed} needed, {show_bytes(abs(left))} "
    answer += "to spare" if left >= 0 else "too much"
    if left < 0:
        answer += (
            f"; would fit: {', or '.join(item.instead)}"
            if item.instead
            else "; nor would another placement, or more ranks"
        )
    if item.largest_batch is None:
        return answer
    if item.largest_batch == 0:
        return f"{answer}; not even a batch of 1 fits"
    power = 1 << (item.largest_batch.bit_length() - 1)
    return f"{answer}; largest batch {item.largest_batch} (as a power of two: {power})"


def _moments(item: RankPlan) -> str:
    others = [moment for moment in item.moments if moment is not item.peak]
    beside = "; ".join(f"{moment.name} {show_bytes(moment.total)}" for moment in others)
    return f"{item.peak.name}, {show_bytes(item.total)}" + (f" ({beside})" if beside else "")


def _traffic(item: RankPlan) -> str:
    """`475 MiB = (2 − 1)/2 × (2 × gradients), 40 ms on the link: backward (…) hides all but 2 ms`."""
    traffic = item.traffic
    text = f"{show_bytes(traffic.sent_bytes)} = {traffic.formula}"
    if traffic.seconds is None:
        return f"{text}; whether backward hides it is unknown without the link's speed"
    text += f", {show_seconds(traffic.seconds)} on the link"
    exposed = traffic.exposed_s
    if exposed is None or traffic.backward_s is None:
        return f"{text}; whether backward hides it is unknown without its duration"
    compute, seconds = "backward", traffic.backward_s
    if traffic.in_forward_bytes:
        compute, seconds = "forward and backward", traffic.forward_s + traffic.backward_s
    if traffic.seconds <= seconds:
        return f"{text}: hidden behind {compute} ({show_seconds(seconds)}) except for {show_seconds(exposed)}"
    return f"{text}: longer than {compute} ({show_seconds(seconds)}), {show_seconds(exposed)} exposed"
