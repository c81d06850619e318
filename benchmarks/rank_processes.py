"""The ranks of a measurement: processes of this host, which share a GPU where there are not enough of them."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT_S = 300.0  # without a line from rank 0


def run_ranks(program: str, ranks: int, settings: Any) -> Iterator[Any]:
    """Start `program --rank ...` on so many ranks, and yield what rank 0 prints, line by line."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        processes, errors = [], [Path(folder, f"rank{rank}") for rank in range(ranks)]
        for rank, log in enumerate(errors):
            given = json.dumps([rank, ranks, str(Path(folder, "store")), settings])
            command = [sys.executable, program, "--rank", given]
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=ends.enter_context(log.open("wb")),
                env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
                text=True,
            )
            ends.callback(process.wait)
            ends.callback(process.kill)
            processes.append(process)
        assert processes[0].stdout is not None
        for line in ends.enter_context(processes[0].stdout):
            yield json.loads(line)
        _await_all(processes, errors)


def _await_all(processes: Sequence[subprocess.Popen[str]], errors: Sequence[Path]) -> None:
    until = time.monotonic() + TIMEOUT_S
    for process, log in zip(processes, errors, strict=True):
        try:
            status = process.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = None
        if status != 0:
            raise RuntimeError(f"{log.name} ended with status {status}: {log.read_text()[-2000:]}")


def join(rank: int, size: int, store: str, device: str) -> Any:
    """Form the default group of these ranks. Returns this rank's device."""
    import torch
    import torch.distributed as dist

    from paceline.bench.tasks.process_group import choose_device

    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    own = choose_device(device, rank, size)
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    return own
