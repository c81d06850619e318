"""The trainer against a plain loop over the same model on one GPU: tokens per second, runs in turn.

    python benchmarks/trainer_gpu.py --json result.json

`plain`: torch alone, the trainer's model and data, no paceline in the step. `trainer`: `paceline train` as one rank.
"""

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline.bench.results import dump_json
from paceline.train.config import TrainConfig
from paceline.train.model import GPT
from paceline.train.optimizer import matrices_and_vectors
from paceline.train.run_folder import RunFolder
from paceline.train.samples import prepare

CONTEXT = 1024
WARM, TIMED = 10, 40


def plain(batch: int, microbatches: int, *, compiled: bool = False, deterministic: bool = False) -> float:
    """Tokens per second of a plain loop that accumulates `microbatches` microbatches of `batch` samples."""
    use_kernels(deterministic=deterministic)
    config, next_batch, net, optimizer = parts(batch)
    model: Any = torch.compile(net) if compiled else net

    def step() -> None:
        for _ in range(microbatches):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(*next_batch())
            (loss / microbatches).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()

    return rate(step, batch * microbatches)


def lanes(batch: int, count: int, *, deterministic: bool) -> float:
    """The same microbatches as lanes of a replica, in a loop of one's own."""
    use_kernels(deterministic=deterministic)
    config, next_batch, net, optimizer = parts(batch)
    model = paceline.DistributedDataParallel(net, lanes=count)
    number = 0

    def step() -> None:
        nonlocal number
        for tokens, targets in model.lanes([next_batch() for _ in range(count)], number):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens, targets)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        number += 1

    return rate(step, batch * count)


def use_kernels(*, deterministic: bool) -> None:
    """As the trainer does it."""
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def parts(batch: int) -> tuple[TrainConfig, Callable[[], Any], GPT, torch.optim.Optimizer]:
    config = TrainConfig(size="gpt2", dtype="bf16", batch=batch)
    text = prepare(config, Path(tempfile.mkdtemp()))
    torch.manual_seed(0)
    net = GPT(config.shape, text.tokenizer.vocabulary).cuda()
    place = 0

    def next_batch() -> Any:
        nonlocal place
        tokens, targets = zip(*(text.train[(place + index) % len(text.train)] for index in range(batch)), strict=True)
        place += batch
        return tuple(torch.stack(part).pin_memory().cuda(non_blocking=True) for part in (tokens, targets))

    matrices, vectors = matrices_and_vectors(net)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
    return config, next_batch, net, optimizer


def rate(step: Callable[[], None], samples: int) -> float:
    timed = max(8, TIMED * 16 // samples) if samples > 16 else TIMED
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(timed):
        step()
    torch.cuda.synchronize()
    return timed * samples * CONTEXT / (time.perf_counter() - began)


def trainer(**settings: Any) -> tuple[float, dict[str, Any]]:
    """Tokens per second of `paceline train`, from the median of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            size="gpt2",
            dtype="bf16",
            out=folder + "/run",
            eval_every=0,
            save_every=0,
            sample=0,
            eval_samples=1,
            **settings,
        )
        run = RunFolder.prepare(config.settled(on_gpu=True))
        run.release()
        done = subprocess.run(
            [sys.executable, "-m", "paceline.train", str(run.path)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
        result = run.result()
        seconds = [line["step_s"] for line in run.metrics() if "step_s" in line and line["step"] > WARM]
        return result["tokens_per_step"] / statistics.median(seconds), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    paceline.init()
    runs: dict[str, Callable[[], float]] = {
        "plain 1x16": lambda: plain(16, 1),
        "trainer 1x16": lambda: trainer(lanes=0, batch=16, steps=60)[0],
        "plain 1x16 compiled": lambda: plain(16, 1, compiled=True),
        "trainer 1x16 compiled": lambda: trainer(lanes=0, batch=16, steps=60, compile=True)[0],
        "plain 8x2": lambda: plain(2, 8),
        "plain 8x2 deterministic": lambda: plain(2, 8, deterministic=True),
        "lanes 8x2": lambda: lanes(2, 8, deterministic=False),
        "lanes 8x2 deterministic": lambda: lanes(2, 8, deterministic=True),
        "plain 8x16": lambda: plain(16, 8),
        "plain 8x16 deterministic": lambda: plain(16, 8, deterministic=True),
        "lanes 8x16": lambda: lanes(16, 8, deterministic=False),
        "lanes 8x16 deterministic": lambda: lanes(16, 8, deterministic=True),
        "trainer default": lambda: trainer(steps=40)[0],
    }
    found: dict[str, list[float]] = {name: [] for name in runs if not given.only or given.only in name}
    for _ in range(given.rounds):
        for name in found:
            found[name].append(runs[name]())
            torch.cuda.empty_cache()
            print(f"{name:28s} {found[name][-1]:10,.0f} tokens/s", flush=True)  # noqa: T201
    if given.json:
        about = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        given.json.write_text(dump_json({**about, "tokens_per_second": found}))


if __name__ == "__main__":
    main()
