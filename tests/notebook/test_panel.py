"""The panel of a training cell, made from what real ranks did."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline.notebook.output.gantt import COLOURS, LETTER, gantt
from paceline.notebook.output.panel import BAR, panel, verdict
from paceline.notebook.rank.rank_requests import SHOWN_STEPS, collect
from paceline.observe.timeline import SpanKind as Kind
from tests import conftest
from tests.pool import Pool

leak_police = conftest.leak_police  # per test: it knows the ranks of the session, which live on

Told = dict[str, Any]
SVG = "{http://www.w3.org/2000/svg}"
LATE_S = 0.02  # in each of two microbatches
STEPS = 10


def trains(rank: int, size: int, late: bool, name: str) -> str:
    """Some steps of two microbatches, the second reduced. Rank 1 takes its time in forward, if it is to be late."""
    import torch
    from torch import nn

    import paceline

    class Net(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(LATE_S if late and rank == 1 else 0.0)
            for layer in self:
                x = layer(x)
            return x

    Net.__name__ = name
    model = paceline.DistributedDataParallel(Net(nn.Linear(8, 8), nn.Linear(8, 8)), bucket_cap_mb=1e-6)
    optimizer = torch.optim.AdamW(model.parameters())

    def steps(count: int) -> None:
        for _ in range(count):
            with model.no_sync():
                model(torch.ones(2, 8)).sum().backward()
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(2)  # of an earlier cell
    since = time.perf_counter_ns()
    assert collect(since) == {"replicas": []}
    steps(STEPS)
    return json.dumps(collect(since))


def run(procs: Pool, *, late: bool, name: str = "Net") -> dict[int, Told]:
    return {rank: json.loads(told) for rank, told in enumerate(procs(2).run(trains, late, name))}


@pytest.fixture(scope="module")
def late(procs: Pool) -> dict[int, Told]:
    return run(procs, late=True)


@pytest.fixture
def replicas(late: dict[int, Told]) -> dict[int, Told]:
    return {rank: told["replicas"][0] for rank, told in late.items()}


def made(exposed: Sequence[Sequence[float]], hidden: float = 1.0, **mean: float) -> dict[int, Told]:
    """Replicas with these exposed milliseconds in every step, rank by rank."""
    found: dict[int, Told] = {}
    for rank, waits in enumerate(exposed):
        spans, now = [], 0
        for step, wait in enumerate(waits):
            ends = [now + 10**6, now + 10**6 + int(wait * 1e6)]
            spans += [["backward", now, ends[0], step, -1], ["communication exposed", *ends, step, 0]]
            now = ends[1]
        means = dict.fromkeys((kind.value for kind in Kind), 0.0)
        means |= {"communication hidden": hidden, "communication exposed": sum(waits) / len(waits), "step": 20.0}
        means |= {"backward": mean.get(f"backward{rank}", 1.0)}
        steps = len(waits)
        found[rank] = {"module": "Net", "device": "cpu", "size": len(exposed), "steps": steps, "after_first": False}
        found[rank] |= {"mean_ms": means, "spans": spans}
    return found


# ---- what ranks tell


@pytest.mark.alone
def test_a_rank_tells_its_last_steps_and_means_over_all(replicas: dict[int, Told]) -> None:
    for replica in replicas.values():
        assert (replica["module"], replica["device"], replica["size"]) == ("Net", "cpu", 2)
        assert replica["steps"] == STEPS
        assert {step for *_, step, _ in replica["spans"]} == set(range(STEPS + 3 - SHOWN_STEPS, STEPS + 3))
        kinds = {kind for kind, *_ in replica["spans"]}
        assert kinds >= {"forward", "backward", "communication exposed", "optimizer", "idle"}
        means = replica["mean_ms"]
        assert all(means[name] > 0 for name in ("forward", "backward", "communication exposed", "optimizer"))
    assert replicas[1]["mean_ms"]["forward"] > 2e3 * LATE_S > replicas[0]["mean_ms"]["forward"]
    assert replicas[0]["mean_ms"]["communication exposed"] > 0.5e3 * LATE_S


def test_steps_of_the_ranks_are_at_the_same_time(replicas: dict[int, Told]) -> None:
    """Their clocks compare: a reduction cannot end on one rank before the other has begun it."""
    for step in range(STEPS, STEPS + 3):
        times = [[span[1:3] for span in replica["spans"] if span[3] == step] for replica in replicas.values()]
        begins, ends = [min(t)[0] for t in times], [max(end for _, end in t) for t in times]
        assert max(begins) < min(ends)


def test_without_a_replica_nothing_is_told_and_torch_is_not_loaded() -> None:
    code = (
        "import sys\n"
        "from paceline.notebook.output.panel import panel\n"
        "from paceline.notebook.rank.rank_requests import collect\n"
        "assert panel({0: collect(0)}) == {}; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- the sentence


@pytest.mark.alone
def test_a_late_rank_is_named(replicas: dict[int, Told]) -> None:
    said = verdict(replicas)
    assert re.fullmatch(r"rank 1 is late: rank 0 waits (\d+\.\d) ms for it in .*; its forward takes .* longer", said)
    waits = float(said.split("waits ")[1].split()[0])
    assert 0.5e3 * LATE_S < waits < 3e3 * LATE_S


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (made([[3, 3], [3, 3]], hidden=9), "communication is 75 % hidden: a rank waits 3.00 ms in a step of 20.0 ms"),
        (made([[9, 9], [1, 1]]), "rank 1 is late: rank 0 waits 8.00 ms for it in every step"),
        (
            made([[1] * 8, [9] * 7 + [0], [5] * 8], backward0=9.0),
            "rank 0 is late: ranks 1 and 2 wait up to 6.88 ms for it in 7 of 8 steps; its backward takes 8.00 ms",
        ),
        (made([[9, 1, 9, 1], [1, 9, 1, 9]], hidden=0), "communication is 0 % hidden"),  # in turn: nobody is late
        (made([[0.1], [0.0]], hidden=0.3), "communication is 86 % hidden"),  # too little to blame someone
        (made([[0]], hidden=0), "one rank: there is nothing to communicate"),
        (made([[0], [0]], hidden=0), "nothing was communicated"),
    ],
)
def test_verdicts(told: dict[int, Told], said: str) -> None:
    assert verdict(told).startswith(said)


# ---- the picture


def parse(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html)


def test_the_html_is_well_formed_and_stands_alone(late: dict[int, Told], tmp_path: Path) -> None:
    html = panel(late)["text/html"]
    file = Path(os.environ.get("PACELINE_PANEL_FILE", tmp_path / "panel.html"))
    file.write_text(f"<!doctype html><meta charset='utf-8'>{html}")
    tree = parse(html)
    assert {node.tag.removeprefix(SVG) for node in tree.iter()}.isdisjoint({"script", "style", "link", "img", "image"})
    assert re.findall(r"https?:[^\"]*", html) == ["http://www.w3.org/2000/svg"]
    assert "".join(tree.itertext()).count("rank 1 is late") == 1
    rows = [[cell.text for cell in row] for row in tree.iter("tr")]
    columns = ["step", "forward", "backward", "hidden", "exposed", "optimizer", "other"]
    assert rows[0] == [f"mean of {STEPS} steps, ms", *columns]
    assert [row[0] for row in rows[1:]] == ["rank 0", "rank 1"]
    assert float(rows[2][2]) > 1e3 * LATE_S  # type: ignore[arg-type]


def boxes(svg: ElementTree.Element) -> Iterator[tuple[float, float, float, float]]:
    """Left, top, right, bottom of every text, at its widest."""
    for text in svg.iter(f"{SVG}text"):
        x, y, width = float(text.attrib["x"]), float(text.attrib["y"]), LETTER * len(text.text or "")
        left = x - width / 2 if text.get("text-anchor") == "middle" else x
        yield left, y - 12, left + width, y + 3


@pytest.mark.parametrize("steps", [1, 8, 60])
@pytest.mark.parametrize("ms", [0.001, 3, 7777])
def test_no_text_touches_another_or_the_edge(steps: int, ms: float) -> None:
    svg = parse(gantt(made([[ms] * steps] * 4)))
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    found = list(boxes(svg))
    assert len(found) >= 4 + 1 + 2, "ranks, a step, and two ticks at least"
    for place, (left, top, right, bottom) in enumerate(found):
        assert left >= 0 and top >= -3 and right <= width and bottom <= height
        for other in found[place + 1 :]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top


def test_bars_are_as_long_as_spans_and_inside(replicas: dict[int, Told]) -> None:
    svg = parse(gantt(replicas))
    width = float(svg.attrib["viewBox"].split()[2])
    bars = [bar for bar in svg.iter(f"{SVG}rect") if bar.attrib["fill"] != "currentColor"]
    assert all(64 <= x < width for x in (float(bar.attrib["x"]) for bar in bars))
    waits = [0.0, 0.0]
    for bar in bars:
        if bar.attrib["fill"] == COLOURS[Kind.EXPOSED]:
            title = bar[0].text or ""
            waits[int(title.split()[1].rstrip(","))] += float(bar.attrib["width"])
    assert waits[0] > 3 * waits[1], "rank 0 waits for rank 1"
    begins = [span[1] for replica in replicas.values() for span in replica["spans"]]
    ends = [span[2] for replica in replicas.values() for span in replica["spans"]]
    drawn_share = waits[0] / (width - 80)
    told = sum(span[2] - span[1] for span in replicas[0]["spans"] if span[0] == "communication exposed")
    assert drawn_share == pytest.approx(told / (max(ends) - min(begins)), rel=0.05)


def test_many_buckets_stay_a_small_picture() -> None:
    told = made([[5.0]] * 2)
    for replica in told.values():
        replica["spans"] = [["communication hidden", 1000 * n, 1000 * n + 999, 0, n] for n in range(5000)]
    assert len(gantt(told)) < 20_000 * 2


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("page", ["#ffffff", "#111111", "#1e1e1e"])
def test_colours_stand_out_on_light_and_dark_pages(page: str) -> None:
    """The contrast that WCAG asks of graphics."""
    for colour in COLOURS.values():
        low, high = sorted((luminance(colour), luminance(page)))
        assert (high + 0.05) / (low + 0.05) >= 3, colour


def test_what_ranks_send_is_escaped() -> None:
    bad = "<script>alert('&')</script>"
    one, two = made([[1], [1]]), made([[1], [1]])
    told = {rank: {"replicas": [one[rank] | {"module": bad}, two[rank]]} for rank in one}
    html = panel(told)["text/html"]
    assert "<script" not in html
    assert bad in "".join(parse(html).itertext())


# ---- the text


def test_the_text_is_a_table_with_bars(late: dict[int, Told]) -> None:
    said, *rows, letters = panel(late)["text/plain"].splitlines()
    assert said.startswith("rank 1 is late")
    assert len({len(row) for row in rows}) == 1
    assert len(rows) == 3 and max(map(len, rows)) < 120
    bars = [row[8 : 8 + BAR].rstrip() for row in rows[1:]]
    assert bars[0].count("!") > BAR / 2 and bars[1].count("f") > BAR / 2
    assert letters == "f forward, b backward, ! communication exposed, o optimizer, . other"


def test_two_models_of_a_rank_are_told_apart() -> None:
    one, two = made([[1, 1], [1, 1]]), made([[9, 9], [1, 1]])
    told = {rank: {"replicas": [one[rank], two[rank]]} for rank in one}
    text = panel(told)["text/plain"]
    assert text.count("Net: ") == 2 and text.count("rank 1 is late") == 1
    assert panel(told)["text/html"].count("<svg") == 2


@pytest.mark.parametrize("told", [{}, {0: {}}, {0: {"replicas": []}, 1: {"error": "gone"}}])
def test_nothing_to_show(told: dict[int, Told]) -> None:
    assert panel(told) == {}
