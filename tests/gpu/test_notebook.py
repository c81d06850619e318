"""The ranks of a notebook on a GPU: one over NCCL, two that share it over gloo."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel")

from tests.notebook.notebook import Notebook

pytestmark = pytest.mark.timeout(120)

MODEL = """
torch.manual_seed(0)
model = paceline.DistributedDataParallel(torch.nn.Linear(64, 8).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
TRAIN = """
x = torch.ones(4, 64, device=device) * (rank + 1)
for _ in range(10):
    model(x).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
total = sum(p.sum() for p in model.parameters()).item()
print(f"{total:.6f}")
"""


@pytest.fixture(scope="module", params=[1, 2])
def notebook(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Any]]:
    folder: Path = tmp_path_factory.mktemp("kernel")
    found = Notebook(folder)
    try:
        found.good("%load_ext paceline")
        assert "ready → GPU 0 (cuda:0)" in found.good(f"%dist_init -n {request.param}").all
        yield request.param, found
    finally:
        found.close()


def sums(said: str) -> list[str]:
    return re.findall(r"-?\d+\.\d{6}", said)


def test_ranks_train_and_the_status_tells_the_memory_of_the_gpu(notebook: tuple[int, Notebook]) -> None:
    size, book = notebook
    book.good(MODEL)
    assert len(set(sums(book.good(TRAIN).stdout))) == 1
    status = book.good("%dist_status").stdout
    assert status.count("GPU memory: ") == size


def test_a_cell_that_waits_on_the_gpu_is_stopped(notebook: tuple[int, Notebook]) -> None:
    size, book = notebook
    if size == 1:
        pytest.skip("a world of one waits for nobody")
    for wait in ("dist.all_reduce(x); x.sum().item()", "model(x).square().mean().backward()"):
        book.good(TRAIN)
        found = book.run(f"%%rank [0]\nprint('in')\n{wait}", stop_at="in\n")
        assert "KeyboardInterrupt" in found.error
        assert "lost the group's store" not in found.all
        assert len(set(sums(book.good(TRAIN).stdout))) == 1


def test_a_rank_that_was_killed_comes_back(notebook: tuple[int, Notebook]) -> None:
    size, book = notebook
    book.good(f"%dist_kill {size - 1}")
    book.good(f"%dist_restart {size - 1}")
    book.good(MODEL)
    assert len(set(sums(book.good(TRAIN).stdout))) == 1
