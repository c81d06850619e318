"""The tree of %dist_status."""

from typing import Any

from paceline.notebook.output.status import tree
from paceline.notebook.rank_kernels.connection import RankFacts, RankState

MIB, GIB = 1 << 20, 1 << 30


def facts(rank: int, state: RankState, **changes: Any) -> RankFacts:
    fields = {"device": "cpu", "gpu_id": None, "python": "3.11.7", "torch": "2.13.0", "died": "", **changes}
    return RankFacts(rank, 100 + rank, state, **fields)


def test_ranks_on_a_cpu() -> None:
    ranks = [facts(0, RankState.IDLE), facts(1, RankState.BUSY)]
    answers = {
        0: {"status": "ok", "rss_bytes": 300 * MIB, "line": None, "source": "", "waits_in": None},
        1: {"status": "ok", "rss_bytes": 3 * GIB // 2, "line": 3, "source": "dist.barrier()", "waits_in": "barrier"},
    }
    assert tree(ranks, answers).split("\n") == [
        "2 ranks · Python 3.11.7 · torch 2.13.0",
        "Rank 0: ✓ PID 100",
        "  ├─ Device: CPU",
        "  ├─ Memory: 300 MiB",
        "  └─ State: idle",
        "Rank 1: ● PID 101",
        "  ├─ Device: CPU",
        "  ├─ Memory: 1.5 GiB",
        "  └─ State: busy, line 3: dist.barrier(), waits in barrier",
    ]


def test_a_rank_on_a_gpu() -> None:
    answer = {
        "rss_bytes": 2 * GIB,
        "gpu_allocated_bytes": 512 * MIB,
        "gpu_reserved_bytes": GIB,
        "gpu_free_bytes": 60 * GIB,
        "gpu_bytes": 80 * GIB,
    }
    lines = tree([facts(0, RankState.IDLE, device="cuda:1", gpu_id=1)], {0: answer}).split("\n")
    assert lines[0].startswith("1 rank ·")
    assert lines[2:4] == [
        "  ├─ GPU: 1 (cuda:1)",
        "  ├─ GPU memory: 512 MiB in tensors, 1.0 GiB held by torch; device: 20.0 GiB of 80.0 GiB used",
    ]


def test_dead_silent_and_starting_ranks() -> None:
    ranks = [
        facts(0, RankState.DEAD, died="was killed by SIGKILL"),
        facts(1, RankState.BUSY),
        facts(2, RankState.STARTING, torch="", python=""),
        facts(3, RankState.BUSY),
    ]
    failed = {"status": "error", "ename": "RuntimeError", "evalue": "CUDA error"}
    text = tree(ranks, {3: failed})
    assert text.startswith("4 ranks, 1 dead · ")
    assert "Rank 0: ✗ PID 100" in text
    assert "State: dead: was killed by SIGKILL; %dist_restart 0 brings it back" in text
    assert "Rank 1: ● PID 101\n  ├─ Device: CPU\n  └─ State: busy, does not answer" in text
    assert "Rank 2: … PID 102\n  ├─ Device: CPU\n  └─ State: starting" in text
    assert "State: busy, asking it failed: RuntimeError: CUDA error" in text


def test_long_lines_are_cut() -> None:
    answer = {"rss_bytes": MIB, "line": 1, "source": "x" * 500, "waits_in": None}
    assert all(len(line) < 120 for line in tree([facts(0, RankState.BUSY)], {0: answer}).split("\n"))
