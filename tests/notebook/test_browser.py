"""A person's way through a notebook: JupyterLab in a real browser, with the keyboard and the stop button.

`PACELINE_SCREENSHOT=docs/notebook.png ./scripts/test tests/notebook/test_browser.py` also stores its picture there.
"""

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.notebook.lab import Lab, Page, open_page

TRAINING = """\
from tqdm import tqdm
net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
model = paceline.DistributedDataParallel(net, bucket_cap_mb=1)
optimizer = torch.optim.AdamW(model.parameters())
for step in tqdm(range(20)):
    loss = model(torch.randn(256, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss:.4f}")"""
CELLS = (
    "%load_ext paceline",
    "%dist_init -n 2",
    'dist.barrier()\nprint("hello")\nprint("this is rank", rank)',
    TRAINING,
    "batch_of_this_rank = torch.ones(4, 3 + rank)\nbatch_of_this_rank @ torch.ones(4)",
    "%%rank [0]\ndist.barrier()",
    "total = torch.ones(2) * rank\ndist.all_reduce(total)\ntotal",
    "",
)
LOAD, INIT, PRINT, TRAIN, ERROR, STOP, AFTER, TYPED = range(len(CELLS))
# The stop itself is timed in test_rank_kernels.py; here a browser and a server have their share.
STOPPED_S = 5.0


@pytest.fixture
def chromium() -> str:
    found = shutil.which("chromium")
    if found is None and "PACELINE_NEEDS_BROWSER" in os.environ:
        pytest.fail("there is no chromium, and PACELINE_NEEDS_BROWSER is set: ./scripts/install-browser installs it")
    return found or pytest.skip("there is no chromium: ./scripts/install-browser installs it")


@pytest.mark.timeout(120)
def test_a_notebook_in_a_browser(tmp_path: Path, reserved_port: int, chromium: str) -> None:
    lab = Lab(tmp_path / "lab", reserved_port, CELLS)
    with lab:
        with open_page(lab, chromium) as page:
            starts(page)
            trains(page)
            fails(page)
            picture = tmp_path / "notebook.png"
            page.picture(picture, last=ERROR)
            if "PACELINE_SCREENSHOT" in os.environ:
                shutil.copy(picture, os.environ["PACELINE_SCREENSHOT"])
            stops(page)
            completes(page)
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 300_000
        running = lab.processes()
        assert len(running) >= 5, f"a server, a kernel, a reaper and two ranks, not {running}"
    assert lab.processes() == {}, "the server has ended, and everything with it"


def written(text: str, line: str, rank: int) -> bool:
    """Whether a line has this rank in its gutter, alone or with the other."""
    return re.search(rf"^\[({rank}|0-1)\] {line}", text, re.MULTILINE) is not None


def starts(page: Page) -> None:
    assert page.run(LOAD) == ""
    booted = page.run(INIT, within_s=40)
    assert re.search(r"rank 0 .* ready → cpu, pid \d+\nrank 1 .* ready → cpu, pid \d+\n2 ranks in ", booted)
    said = page.run(PRINT)
    assert written(said, "hello$", 0) and written(said, "hello$", 1)
    assert "[0] this is rank 0\n[1] this is rank 1" in said


def trains(page: Page) -> None:
    said = page.run(TRAIN, within_s=40)
    for rank in (0, 1):
        assert written(said, r"100%\|█+\| 20/20", rank)
        assert written(said, r"loss \d\.\d+$", rank)
    chart = page.below(TRAIN).locator('svg[aria-label="what each rank did"]')
    chart.wait_for(timeout=10_000)
    assert chart.locator("rect").count() > 2 * 8 * 3, (
        "8 steps of 2 ranks have a forward, a backward and an optimizer at least"
    )
    said = page.output(TRAIN)
    assert re.search(r"^(rank \d is late: |communication is \d+ % hidden)", said, re.MULTILINE)
    columns = r"step\tforward\tbackward\thidden\texposed\toptimizer\tother"
    assert re.search(rf"^mean of 19 steps after the first, ms\t{columns}$", said, re.MULTILINE)
    assert re.search(r"^rank 1(\t\d+\.\d+){7}$", said, re.MULTILINE)


def fails(page: Page) -> None:
    said = page.run(ERROR)
    assert written(said, r"tensor\(\[4\., 4\., 4\., 4\.\]\)", 1)
    assert f"RuntimeError on rank 0 (1 of 2)\nCell In[{ERROR + 1}], line 2\n" in said
    assert "----> 2 batch_of_this_rank @ torch.ones(4)" in said


def stops(page: Page) -> None:
    """Rank 0 alone in a barrier: the cell says so, the stop button ends it, and the next cell finds all ranks."""
    page.begin()
    page.below(STOP).get_by_text("rank 0 waits in barrier (line 2) for rank 1").wait_for(timeout=10_000)
    assert not page.is_over(STOP)
    pressed = time.monotonic()
    page.stop()
    said = page.finish(STOP)
    assert time.monotonic() - pressed < STOPPED_S
    assert "KeyboardInterrupt on rank 0" in said
    said = page.run(AFTER)
    assert written(said, r"tensor\(\[1\., 1\.\]\)", 0) and written(said, r"tensor\(\[1\., 1\.\]\)", 1)


def completes(page: Page) -> None:
    """A name that the notebook's own kernel does not know."""
    page.type("batch_of_")
    assert any("batch_of_this_rank" in offered for offered in page.complete())
    page.press("Enter")
    assert page.source(TYPED).strip() == "batch_of_this_rank"
