"""The plot of the loss, and a self-contained HTML report about the run."""

import base64
import html
from dataclasses import replace
from io import BytesIO
from typing import Any

from paceline.stored.directory import replace_file
from paceline.train.config import to_toml
from paceline.train.run_folder import RunFolder

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.4rem} h2{font-size:1.1rem;margin-top:2rem} table{border-collapse:collapse}
td{padding:.2rem 1rem .2rem 0;vertical-align:top;overflow-wrap:anywhere} td:first-child{color:#666;white-space:nowrap}
pre{background:#f6f6f4;padding:1rem;overflow:auto;border-radius:.4rem} img{max-width:100%}
@media(prefers-color-scheme:dark){body{background:#16181c;color:#ddd}pre{background:#22252b}td:first-child{color:#999}}
"""


def write_picture(folder: RunFolder) -> bool:
    """Draw loss.png. False where matplotlib is not installed: the run is complete without it."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    lines = folder.metrics()
    train = [(line["step"], line["loss"]) for line in lines if line.get("loss") is not None]
    held_out = [(line["step"], line["held_out"]) for line in lines if line.get("held_out") is not None]
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    if train:
        axes.plot(*zip(*train, strict=True), color="#b9c4d0", linewidth=0.8, label="training, each step")
        axes.plot(*zip(*_smooth(train), strict=True), color="#1f5fa8", linewidth=1.8, label="training, smoothed")
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True), "o-", color="#d1662b", linewidth=1.4, markersize=4, label="held-out text"
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=110)
    replace_file(folder.picture_file, [drawn.getvalue()])
    return True


def _smooth(points: list[tuple[int, float]], keep: float = 0.9) -> list[tuple[int, float]]:
    smooth, out = points[0][1], []
    for step, value in points:
        smooth = keep * smooth + (1 - keep) * value
        out.append((step, smooth))
    return out


def write_report(folder: RunFolder) -> None:
    """Write report.html from the other files of the folder."""
    result = folder.result()
    picture = ""
    if folder.picture_file.exists():
        data = base64.b64encode(folder.picture_file.read_bytes()).decode()
        picture = f'<h2>Loss</h2><img alt="loss by step" src="data:image/png;base64,{data}">'
    lines = (*facts(result), *((name, str(result[name])) for name in ("date", "machine", "versions")))
    rows = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(text)}</td></tr>" for name, text in lines)
    sample = f"<h2>A sample</h2><pre>{html.escape(result['sample'])}</pre>" if result["sample"] else ""
    ran = replace(folder.config(), ranks=result["ranks"])  # where the setting 0 leaves the number to the machine
    config = f"<h2>Configuration</h2><pre>{html.escape(to_toml(ran))}</pre>"
    title = f"paceline train, {html.escape(folder.path.name)}"
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style>'
        f"<h1>{title}</h1><table>{rows}</table>{picture}{sample}{config}</html>\n"
    )
    replace_file(folder.report_file, [page.encode()])


def facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The result in lines to read: the report and the terminal show the same ones."""
    where = f"{_count(result['ranks'], 'rank')}, {result['placement']}"
    where += f" over {result['shard']}" if result["shard"] else ""
    where += f", in {result['lanes']} lanes" if result["lanes"] else ""
    lines = [
        ("model", f"{result['parameters'] / 1e6:.2f} M parameters on {where}"),
        ("text", str(result["source"])),
        ("steps", f"{result['steps']}, {result['own_steps']} of them in this attempt, in {result['seconds']:.0f} s"),
    ]
    if result["step_seconds"] is not None:
        speed = f"{result['tokens_per_second']:,.0f} tokens/s, {result['step_seconds'] * 1e3:.1f} ms per step"
        mfu = result.get("mfu")
        lines.append(("speed", speed if mfu is None else f"{speed}, {mfu:.0%} MFU"))
    if result["held_out_per_byte"] is not None:
        lines.insert(3, ("loss on held-out text", f"{result['held_out_per_byte']:.3f} nats per byte"))
    if result["overlap"] is not None:
        hidden = f"{result['overlap']:.0%} hidden behind backward"
        lines.append(
            ("communication", f"{hidden}, {result['exposed_seconds'] * 1e3:.2f} ms per step exposed (medians)")
        )
    if result["gradient_difference"] is not None:
        lines.append(
            ("gradient check", f"largest gradient difference from one process {result['gradient_difference']:.1e}")
        )
    if result["memory_measured"] and result["memory_planned"]:  # rank 0 plans, and may be another one at the end
        planned, measured = result["memory_planned"], result["memory_measured"]
        off = f"the plan is {planned / measured - 1:+.0%}"
        lines.append(("memory of a rank", f"{_mib(planned)} planned, {_mib(measured)} measured: {off}"))
    if result["resumed_from"]:
        lines.append(
            ("resumed", f"from step {result['resumed_from']}; {_count(result['redone_steps'], 'step')} repeated")
        )
    lines.append(("digest", str(result["digest"])))
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"
