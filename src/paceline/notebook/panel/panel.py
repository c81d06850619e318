"""The panel below a training cell: what each rank did, as HTML, as text, or as a widget.

Takes what `notebook.rank.timeline.collect` gave on each rank. Nothing is loaded from anywhere, and all text that ranks
sent is escaped.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.notebook.panel.gantt import COLOURS, LABELS, gantt
from paceline.notebook.panel.verdict import verdict
from paceline.observe.timeline import Kind

Replicas = Mapping[int, Mapping[str, Any]]

# Name of a column, and under which name its mean is told.
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


def widget(timelines: Mapping[int, Mapping[str, Any]]) -> Any:
    """The same, to zoom into; None where nobody could: without anywidget, outside notebooks, or with nothing to show.

    Where a frontend cannot show widgets after all, it shows the HTML of `panel`.
    """
    return _widget(timelines, panel(timelines))


def _widget(timelines: Mapping[int, Mapping[str, Any]], bundle: Mapping[str, Any]) -> Any:
    if not bundle or find_spec("anywidget") is None or not _in_notebook():
        return None
    import anywidget
    import traitlets

    class Timeline(anywidget.AnyWidget):
        _esm = Path(__file__).with_name("panel.js").read_text()
        told = traitlets.Dict().tag(sync=True)

        def _repr_mimebundle_(self, **given: Any) -> Any:
            shown = super()._repr_mimebundle_(**given)
            data, metadata = shown if isinstance(shown, tuple) else (shown or {}, {})
            return {**data, **bundle}, metadata

    return Timeline(told=drawn(timelines))


def show_panel(timelines: Mapping[int, Mapping[str, Any]]) -> Callable[[], None]:
    """Show it below the cell that runs, in the best form there is; nothing when no rank has reduced gradients.

    What is returned makes a drawing of a widget: a notebook that is opened again has no widgets, unless its frontend
    was told to save them, and shows an error in their place.
    """
    from IPython import display

    show: Any = display.display
    bundle = panel(timelines)
    shown = _widget(timelines, bundle)
    if shown is not None:
        handle = show(shown, display_id=True)
        return lambda: handle.update(bundle, raw=True)
    if bundle:
        show(bundle, raw=True)
    return lambda: None


def drawn(timelines: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """What panel.js draws."""
    return {
        "colours": {kind.value: colour for kind, colour in COLOURS.items()},
        "labels": {kind.value: label for kind, label in LABELS.items()},
        "sections": [
            {
                "name": name,
                "verdict": verdict(replicas),
                "rows": [{"rank": rank, "spans": replica["spans"]} for rank, replica in replicas.items()],
                "table": [[_counted(replicas), *COLUMNS], *_rows(replicas)],
            }
            for name, replicas in _sections(timelines)
        ],
    }


def _sections(timelines: Mapping[int, Mapping[str, Any]]) -> list[tuple[str, Replicas]]:
    """The replicas of all ranks that belong together: of the n-th model of a name. Ranks in order."""
    found: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = {}
    for rank, told in sorted(timelines.items()):
        seen: Counter[str] = Counter()
        for replica in told.get("replicas", ()):
            if replica["spans"]:
                found.setdefault((replica["module"], seen[replica["module"]]), {})[rank] = replica
            seen[replica["module"]] += 1
    return [(name, replicas) for (name, _), replicas in found.items()]


def _in_notebook() -> bool:
    """Whether someone looks at a notebook: not a terminal, nor a tool that only executes one."""
    if "google.colab" in sys.modules:
        return True
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    # Jupyter Server and VS Code leave these in kernels that they start for a notebook.
    opened = os.environ.get("JPY_SESSION_NAME", "").endswith(".ipynb") or "VSCODE_PID" in os.environ
    return getattr(shell, "kernel", None) is not None and opened


# ---- HTML


def _html(name: str, replicas: Replicas, named: bool) -> str:
    said = escape(f"{name}: {verdict(replicas)}" if named else verdict(replicas))
    on_gpu = any(not replica["device"].startswith("cpu") for replica in replicas.values())
    note = f'<div style="opacity:0.75;font-size:12px">{ON_GPU}</div>' if on_gpu else ""
    head = f"<div><b>{said}</b></div>"
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
