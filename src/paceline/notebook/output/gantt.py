"""The steps of all ranks as a drawing: one SVG that needs nothing around it.

Every rank has two tracks on one time axis: above what it computed, below what was communicated meanwhile. Time in which
it only waited fills both. Text takes the colour of the page; the fills are readable on light and dark pages.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from paceline.observe.timeline import SpanKind as Kind

COLOURS = {
    Kind.FORWARD: "#4f94d8",
    Kind.BACKWARD: "#2f6fd0",
    Kind.HIDDEN: "#8a8fa3",
    Kind.EXPOSED: "#dd4b14",
    Kind.OPTIMIZER: "#2b9470",
}
LABELS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.HIDDEN: "communication, hidden",
    Kind.EXPOSED: "communication, exposed: waiting",
    Kind.OPTIMIZER: "optimizer",
}
WIDTH, LEFT, RIGHT = 900, 64, 16
LETTER = 7.0  # at most this wide at this size of text, so that labels can be kept apart
HEAD, TRACK, FLIGHT, GAP, FOOT = 18, 18, 8, 12, 22
ROW = TRACK + FLIGHT + GAP
FONT = 'font-family="system-ui, sans-serif" font-size="12" fill="currentColor"'

Bar = tuple[Kind, int, int, int]  # kind, begin, end, step


def gantt(replicas: Mapping[int, Mapping[str, Any]]) -> str:
    """The SVG of some ranks. Their times must come from one clock."""
    spans = {
        rank: [(Kind(k), a, b, step) for k, a, b, step, _ in replica["spans"]] for rank, replica in replicas.items()
    }
    origin = min(begin for bars in spans.values() for _, begin, _, _ in bars)
    length = max(end for bars in spans.values() for _, _, end, _ in bars) - origin
    scale = (WIDTH - LEFT - RIGHT) / max(1, length)
    height = HEAD + ROW * len(spans) + FOOT
    begin = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="what each rank did" style="width:100%;max-width:{WIDTH}px;height:auto;display:block">'
    )
    parts = [begin, *_step_labels(next(iter(spans.values())), origin, scale)]
    for place, (rank, bars) in enumerate(spans.items()):
        parts += _row(rank, bars, HEAD + place * ROW, origin, scale)
    parts += _axis(length, scale, HEAD + ROW * len(spans))
    return "\n".join([*parts, "</svg>"])


def _row(rank: int, bars: Sequence[Bar], top: int, origin: int, scale: float) -> list[str]:
    width = WIDTH - LEFT - RIGHT
    parts = [
        f'<text x="0" y="{top + 14}" {FONT}>rank {rank}</text>',
        # Idle is what nothing covers.
        f'<rect x="{LEFT}" y="{top}" width="{width}" height="{TRACK}" fill="currentColor" fill-opacity="0.08"/>',
    ]
    for kind, begin, end, step in _joined([bar for bar in bars if bar[0] is not Kind.IDLE], 1 / scale):
        y = top + TRACK if kind is Kind.HIDDEN else top
        height = {Kind.HIDDEN: FLIGHT, Kind.EXPOSED: TRACK + FLIGHT}.get(kind, TRACK)
        title = f"rank {rank}, step {step}: {LABELS[kind]}, {show_ms((end - begin) / 1e6)}"
        parts.append(
            f'<rect x="{LEFT + (begin - origin) * scale:.2f}" y="{y}" width="{max(0.4, (end - begin) * scale):.2f}" '
            f'height="{height}" fill="{COLOURS[kind]}"><title>{escape(title)}</title></rect>'
        )
    return parts


def _joined(bars: Iterable[Bar], pixel: float) -> list[Bar]:
    """Merge neighbours of one kind that are too close to distinguish, so that hundreds of buckets stay a small file."""
    found: list[Bar] = []
    for kind in COLOURS:
        last: Bar | None = None
        for bar in sorted((bar for bar in bars if bar[0] is kind), key=lambda bar: bar[1]):
            near = last is not None and bar[3] == last[3] and bar[1] - last[2] < pixel / 2
            if last is not None and near and min(bar[2] - bar[1], last[2] - last[1]) < 2 * pixel:
                last = (kind, last[1], bar[2], bar[3])
                found[-1] = last
            else:
                last = bar
                found.append(bar)
    return found


def _step_labels(bars: Sequence[Bar], origin: int, scale: float) -> list[str]:
    """Where the steps of the first rank begin."""
    begins: dict[int, int] = {}
    for _, begin, _, step in bars:
        begins[step] = min(begin, begins.get(step, begin))
    labels = [(LEFT + (begin - origin) * scale, f"step {step}") for step, begin in begins.items()]
    return _labelled_ticks(labels, HEAD, HEAD - 6, "start")


def _axis(length: int, scale: float, top: int) -> list[str]:
    """Milliseconds from the left edge, five ticks or so."""
    unit = _round_up(length / 5)
    labels = [
        (LEFT + tick * unit * scale, f"{tick * unit / 1e6:,.10g}" + (" ms" if tick == 0 else ""))
        for tick in range(int(length // unit) + 1)
    ]
    return _labelled_ticks(labels, top, top + 13, "middle")


def _labelled_ticks(labels: Iterable[tuple[float, str]], bottom: int, y: int, anchor: str) -> list[str]:
    """A tick for each; a label that would touch the one before it, or the edge, is left out."""
    parts: list[str] = []
    free = 0.0
    for x, text in labels:
        parts.append(f'<path d="M{x:.2f} {bottom - 4}v4" stroke="currentColor" stroke-opacity="0.5"/>')
        width = LETTER * len(text)
        left = x - width / 2 if anchor == "middle" else x
        if left >= free and left + width <= WIDTH:
            place = f'x="{x:.2f}" y="{y}" text-anchor="{anchor}"'
            parts.append(f'<text {place} {FONT} fill-opacity="0.75">{text}</text>')
            free = left + width + LETTER
    return parts


def _round_up(ns: float) -> float:
    """The next of 1, 2, 5, 10, 20, … nanoseconds."""
    power = 10 ** max(0, len(str(int(ns))) - 1)
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= ns))


def show_ms(ms: float) -> str:
    """Three digits at most."""
    if ms >= 99.5:
        return f"{ms:,.0f} ms"
    return f"{ms:.1f} ms" if ms >= 9.95 else f"{ms:.2f} ms"
