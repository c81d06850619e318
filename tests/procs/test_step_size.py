"""What runs in a plain step can be read: the files whose functions are entered are counted, not chosen."""

import gc
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import paceline
from tests.models import mlp
from tests.pool import Pool

HOME = Path(paceline.__file__).parent
WARM, TRACED, ROUNDS = 12, 3, 3
# Lines and files, by transport: room for what a plain step has to do. FSDP2's step enters 3,936 lines in 5 files.
MOST = {"torch": (3400, 16), "shm": (4200, 20)}


def entered(rank: int, size: int, transport: str) -> list[str]:
    """The files of ours whose functions run in three plain steps.

    Of some rounds the one that enters least: where a rank is late, blocks of shared memory meet that have not met
    before, and what to do with them is prepared, once.
    """
    model = paceline.DistributedDataParallel(mlp(8, 16, 4), transport=transport, timeout=20)
    optimizer = torch.optim.AdamW(model.parameters())
    found: set[str] = set()  # in the round that runs

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    def steps(count: int) -> None:
        for _ in range(count):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(WARM // 2)
    gc.collect()  # memory that other tests and first layouts have left is given back now, and not in a traced step
    steps(WARM // 2)
    rounds: list[list[str]] = []
    gc.disable()
    try:
        for _ in range(ROUNDS):
            found.clear()
            sys.setprofile(note)
            steps(TRACED)
            sys.setprofile(None)
            rounds.append(sorted(name for name in found if Path(name).is_relative_to(HOME)))
    finally:
        sys.setprofile(None)
        gc.enable()
    return min(rounds, key=len)


@pytest.mark.parametrize("transport", MOST)
def test_what_a_plain_step_enters_does_not_grow(procs: Pool, transport: str) -> None:
    files = procs(2).run(entered, transport)[0]
    lines = sum(Path(name).read_text(encoding="utf-8").count("\n") for name in files)
    most_lines, most_files = MOST[transport]
    names = ", ".join(str(Path(name).relative_to(HOME)) for name in files)
    assert lines <= most_lines, f"{lines} lines in {len(files)} files: {names}"
    assert len(files) <= most_files, f"{lines} lines in {len(files)} files: {names}"
