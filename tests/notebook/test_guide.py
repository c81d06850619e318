"""The cells of a beginner's guide to DDP, as written, in one session.

The guide is not part of this repository: PACELINE_GUIDE names its text. What it takes from a hub, and what it tells in
prose between its blocks, stands in the cells here.
"""

import os
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.devices import gpu_count
from tests.notebook.execute import cell_of, errors, execute, nbformat, number, said

GUIDE = os.environ.get("PACELINE_GUIDE", "")
BLOCK = re.compile(r"^ *```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)

STAND_INS = """
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Output:
    loss: torch.Tensor


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(device)

    def forward(self, batch=None, **item):
        item = batch or item
        return Output(torch.nn.functional.mse_loss(self.body(item["x"]), item["y"]))


class Rows(list):
    def select(self, numbers):
        return Rows(self[number] for number in numbers)


numbers = torch.Generator().manual_seed(0)
dataset = Rows(
    {name: torch.randn(2, width, generator=numbers).to(device) for name, width in (("x", 4), ("y", 1))}
    for _ in range(32)
)


def gap(model):
    own = torch.cat([param.detach().flatten() for param in model.parameters()])
    first = own.clone()
    dist.broadcast(first, src=0)
    largest = (own - first).abs().max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()
"""

# What the guide's prose says happens right before one of its blocks, by the words that the block has.
BEFORE = {
    "set_seed(43)  # Same seed": "set_seed(43)\nmodel = Tiny()",
    "# Train without syncing": """
for method in (__call__, train, eval):
    setattr(SimpleDistributedDataParallelism, method.__name__, method)
optimizer = torch.optim.SGD(model.model.parameters(), lr=0.1)
""",
    "ddp_model.sync_gradients()  # Critical": """
SimpleDistributedDataParallelism.sync_gradients = sync_gradients
set_seed(43)
model = Tiny()
ddp_model = SimpleDistributedDataParallelism(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
    # Its own class reads `do_sync` and sets `_do_sync`, so the loop is for ours.
    "grad_accum_steps = 4": """
ddp_model = paceline.DistributedDataParallel(Tiny())
optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
dataloader = train_shard
""",
}
# And right after.
AFTER = {
    "%%rank [0]": "model = Tiny()\nddp_model = SimpleDistributedDataParallelism(model)",
    "# Train without syncing": "print(f'gap {gap(model.model):.6f}')",
    "ddp_model.sync_gradients()  # Critical": "print(f'gap {gap(model):.6f}')",
    "train_shard": "print(len(train_shard), 'of', len(dataset))",
    "grad_accum_steps = 4": "print(f'gap {gap(ddp_model):.6f}')",
}


def blocks() -> list[str]:
    text = Path(GUIDE).read_text(encoding="utf-8") if GUIDE else ""
    return [textwrap.dedent(code).strip("\n") for code in BLOCK.findall(text)]


def for_this_machine(block: str) -> str:
    """The guide's machine has GPUs 1 and 2."""
    return block if gpu_count() > 2 else block.replace(" --gpu-ids 1,2", "")


def notebook_of(guide: list[str]) -> Any:
    cells = [nbformat.v4.new_code_cell("%load_ext paceline", id="load")]
    for place, block in enumerate(guide):
        for when, words in (("before", BEFORE), ("", None), ("after", AFTER)):
            if words is None:
                cells.append(nbformat.v4.new_code_cell(for_this_machine(block), id=f"block-{place}"))
                continue
            added = [code for word, code in words.items() if word in block]
            cells += [nbformat.v4.new_code_cell(code.strip("\n"), id=f"{when}-{place}") for code in added]
        if "%dist_init" in block:
            cells.append(nbformat.v4.new_code_cell(STAND_INS.strip("\n"), id="stand-ins"))
        if "%%rank [0]" in block:
            # Rank 1 raises, rank 0 goes on to a broadcast that never ends, and a learner presses stop.
            cells[-1].metadata.update(tags=["raises-exception"], stop_after_s=8)
    cells.append(nbformat.v4.new_code_cell("%dist_shutdown", id="end"))
    return nbformat.v4.new_notebook(cells=cells)


def cell_id(role: str, words: str) -> str:
    """Of the block that has these words, or of the cell before or after it."""
    return f"{role}-{next(place for place, block in enumerate(blocks()) if words in block)}"


pytestmark = pytest.mark.skipif(not GUIDE, reason="PACELINE_GUIDE names no text of the guide")


@pytest.fixture(scope="module")
def guide() -> Any:
    return execute(notebook_of(blocks()))


@pytest.mark.parametrize("place", range(len(blocks())))
def test_a_block_runs_as_written(guide: Any, place: int) -> None:
    assert f"block-{place}" not in errors(guide)
    assert cell_of(guide, f"block-{place}").execution_count is not None


def test_get_answers_on_every_rank(guide: Any) -> None:
    assert sorted(said(guide, cell_id("block", "get(")).split()) == ["0", "1"]


def test_the_check_fails_with_unequal_seeds_and_the_group_lives_on(guide: Any) -> None:
    found = errors(guide)
    assert list(found) == [cell_id("after", "%%rank [0]")]
    (message,) = found.values()
    assert "ValueError on rank 1" in message
    assert "Make sure to set the seeds" in message


def test_replicas_differ_without_sync_and_not_with_it(guide: Any) -> None:
    assert number(guide, cell_id("after", "# Train without syncing"), "gap") > 0.0
    assert number(guide, cell_id("after", "ddp_model.sync_gradients()  # Critical"), "gap") == 0.0
    assert number(guide, cell_id("after", "grad_accum_steps = 4"), "gap") == 0.0
    assert said(guide, cell_id("after", "train_shard")).startswith("16 of 32")
