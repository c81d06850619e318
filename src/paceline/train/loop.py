"""The training loop: plain torch, with paceline's class, loader and checkpoints in it.

run_rank()    one rank, from the start to the result
train()       the loop
step_once()   one optimizer step
"""

import contextlib
import signal
import time
from typing import Any

import torch
from torch import nn

import paceline
from paceline.progress import Phase, Progress
from paceline.tell import tell
from paceline.train.checkpoints import resume, save
from paceline.train.checks import Checks
from paceline.train.closing import close_run
from paceline.train.config import TrainConfig
from paceline.train.evaluate import held_out_loss
from paceline.train.folder import RunFolder
from paceline.train.model import GPT, matrices_and_vectors
from paceline.train.record import Record, StepNumbers
from paceline.train.run import Run
from paceline.train.schedule import rate_at, set_rate
from paceline.train.text import Sample, Text, prepare


def run_rank(config: TrainConfig, folder: RunFolder) -> None:
    """One rank of one run, from the start to the result."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise paceline.errors.UsageError("device='cuda', but torch sees no CUDA device here; expected 'cpu' or 'auto'")
    world = paceline.init(device="cpu" if config.device == "cpu" else None)
    run = build(config, folder, world, prepare(config, folder.path))
    resume(run)
    began = time.monotonic()
    with paceline.Preemption() as preemption:
        ended = train(run, preemption)
    run.checkpoints.wait()
    close_run(run, ended, time.monotonic() - began)
    run.progress.note(Phase.DONE, run.step)
    run.record.close()
    paceline.shutdown()


def train(run: Run, preemption: "paceline.Preemption") -> str:
    """Step until the end, or until some rank is asked to stop. Returns "finished" or "stopped"."""
    config = run.config
    batches = run.loader.endless()
    while run.step < config.steps:
        began = time.perf_counter()
        run.progress.note(Phase.DATA, run.step)
        micros = [to_device(next(batches), run.device) for _ in range(config.accumulate)]
        fetched = time.perf_counter()
        run.progress.note(Phase.FORWARD, run.step)
        loss, norm = step_once(run, micros)
        run.loader.commit(step=run.step)
        mean_loss, stop, now = over_ranks(loss, *asked(preemption))
        numbers = StepNumbers(
            run.step,
            mean_loss,
            rate_at(run.step - 1, config),
            norm,
            seconds=time.perf_counter() - began,
            data_s=fetched - began,
            tokens=sum(tokens.numel() for tokens, _ in micros),
        )
        run.record.step(numbers, run.model.trace.stamps())
        run.checks.after_step(config, run.text)
        if stop or now or run.checkpoints.due(run.step):
            run.progress.note(Phase.CHECKPOINT, run.step)
            save(run)
        if stop:
            return "stopped"
        if config.eval_every and run.step % config.eval_every == 0 and run.step < config.steps:
            run.progress.note(Phase.EVALUATE, run.step)
            loss = held_out_loss(run)
            run.record.held_out(run.step, loss, loss / run.text.bytes_per_token)
    if run.saved_at != run.step:
        save(run)
    return "finished"


def step_once(run: Run, micros: list[Sample]) -> tuple[float, float]:
    """One optimizer step. Returns this rank's mean loss and the norm of all gradients."""
    config = run.config
    if config.dropout:  # masks follow from the step and the rank, so a resumed run draws the same ones
        torch.manual_seed(hash((config.seed, run.step, run.world.rank)) % 2**63)
    set_rate(run.optimizer, rate_at(run.step, config))
    total = torch.zeros((), device=run.device)
    for number, (tokens, targets) in enumerate(micros, start=1):
        with contextlib.nullcontext() if number == len(micros) else run.model.no_sync():
            with torch.autocast(run.device.type, torch.bfloat16, enabled=config.dtype == "bf16"):
                loss = run.model(tokens, targets)
            (loss / len(micros)).backward()
            total += loss.detach() / len(micros)
    norm = nn.utils.clip_grad_norm_(run.net.parameters(), config.clip or float("inf"))
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step += 1
    return float(total), float(norm)


def over_ranks(*numbers: float) -> list[float]:
    """The mean of each number over all ranks."""
    means: list[float] = paceline.all_reduce(torch.tensor(numbers, dtype=torch.float64), "mean").tolist()
    return means


def asked(preemption: "paceline.Preemption") -> tuple[float, float]:
    """Whether this rank was asked to save and stop (SIGTERM), and to save and go on (SIGUSR1)."""
    stop, now = signal.SIGTERM in preemption.signals, signal.SIGUSR1 in preemption.signals
    if now:
        preemption.signals.remove(signal.SIGUSR1)
    return float(stop), float(now)


def to_device(sample: Sample, device: torch.device) -> Sample:
    tokens, targets = sample
    return tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True)


# ---- the parts of a run


def build(config: TrainConfig, folder: RunFolder, world: paceline.World, text: Text) -> Run:
    """Everything, ready for the first step."""
    torch.manual_seed(config.seed)
    net = GPT(config.shape, text.tokenizer.vocabulary, dropout=config.dropout, checkpointing=config.checkpointing)
    net.to(world.device)
    checks = Checks(net, world)
    model: Any = paceline.DistributedDataParallel(net, transport=config.transport)
    parameters = sum(param.numel() for param in net.parameters())
    tell("ready", ranks=world.size, device=str(world.device), parameters=parameters, source=text.source)
    return Run(
        config=config,
        folder=folder,
        world=world,
        text=text,
        net=net,
        model=torch.compile(model) if config.compile else model,
        optimizer=adamw(net, config),
        loader=paceline.Loader(
            text.train,
            config.batch,
            seed=config.seed,
            manual_commit=True,  # a step may take several batches
            reseed=False,  # reading a sample draws no random numbers
            ledger=folder.path / "ledger" if config.audit else None,
        ),
        checkpoints=paceline.Checkpointer(
            folder.checkpoints,
            keep=config.keep,
            every_steps=config.save_every or None,
            every_seconds=config.save_seconds or None,
        ),
        record=Record(config, folder, world.rank, world.size),
        progress=Progress.from_env(),
        checks=checks,
    )


def adamw(net: GPT, config: TrainConfig) -> torch.optim.Optimizer:
    matrices, vectors = matrices_and_vectors(net)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
