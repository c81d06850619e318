"""The training loop: plain torch, with paceline's class, loader and checkpoints in it.

run_rank()    one rank, from the start to the result
train()       the loop
step_once()   one optimizer step
run_lane()    forward and backward of one lane
"""

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

import paceline
from paceline.errors import NotFiniteGradients, UsageError
from paceline.progress import Phase, own_progress
from paceline.tell import tell
from paceline.train.checkpoints import resume, save
from paceline.train.checks import Checks
from paceline.train.closing import close_run
from paceline.train.config import TrainConfig
from paceline.train.evaluate import held_out_loss
from paceline.train.folder import RunFolder
from paceline.train.model import GPT, matrices_and_vectors
from paceline.train.numbers import Unread, due, read_numbers
from paceline.train.record import Record
from paceline.train.run import Run
from paceline.train.schedule import rate_at, set_rate
from paceline.train.text import Sample, Text, prepare


def run_rank(config: TrainConfig, folder: RunFolder) -> None:
    """One rank of one run, from the start to the result."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device='cuda', but torch sees no CUDA device here; expected 'cpu' or 'auto'")
    world = paceline.init(device="cpu" if config.device == "cpu" else None)
    if config.lanes and world.device.type == "cuda":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    run = build(config, folder, world, prepare(config, folder.path))
    resume(run)
    began = time.monotonic()
    with paceline.Preemption() as preemption:
        try:
            ended = train(run, preemption)
        except NotFiniteGradients as error:  # on all ranks alike, and none has stepped on them
            if run.saved_at != run.step:
                save(run)
            run.checkpoints.wait()
            text = f"{error}. Step {run.step} is saved in {folder.checkpoints}"
            raise NotFiniteGradients(text, ranks=error.ranks) from error
    run.checkpoints.wait()
    close_run(run, ended, time.monotonic() - began)
    run.record.close()
    paceline.shutdown()


def train(run: Run, preemption: "paceline.Preemption") -> str:
    """Step until the end, or until some rank is asked to stop. Returns "finished" or "stopped"."""
    config = run.config
    batches = run.loader.endless()
    while run.step < config.steps:
        began = time.perf_counter()
        if not run.unread:
            run.read_at = began
        own_progress().note(Phase.DATA, run.step)
        lanes = next_step(batches, run)
        fetched = time.perf_counter()
        asks = asked(preemption)
        run.model.vote(stop=asks[0], save=asks[1])
        losses, norm = step_once(run, lanes)
        run.loader.commit(step=run.step)
        stop, now = asked_by_any(run, *asks)
        own_tokens = sum(tokens.numel() for micros in lanes for tokens, _ in micros)
        run.unread.append(Unread(run.step, rate_at(run.step - 1, config), losses, norm, fetched - began, own_tokens))
        saves = stop or now or run.checkpoints.due(run.step)
        # Also when it stops here: whoever goes on begins with the step after.
        evaluates = bool(config.eval_every) and run.step % config.eval_every == 0 and run.step < config.steps
        if saves or evaluates or run.step == config.steps or due(run):
            read_numbers(run)
        run.checks.after_step(config, run.text)
        if saves:
            save(run)
        if evaluates:
            loss = held_out_loss(run)
            run.record.held_out(run.step, loss, loss / run.text.bytes_per_token)
        if stop:
            return "stopped"
    if run.saved_at != run.step:
        save(run)
    return "finished"


def next_step(batches: Iterator[Any], run: Run) -> list[list[Sample]]:
    """The micros of one step, for each lane of this rank. Without lanes a rank is like one lane."""
    taken = [next(batches) for _ in range(run.config.accumulate)]
    lanes = zip(*taken, strict=True) if run.config.lanes else [taken]
    return [[to_device(micro, run.device) for micro in micros] for micros in lanes]


def step_once(run: Run, lanes: list[list[Sample]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step. Returns the loss of each of this rank's lanes, and the norm of all gradients, where they are:
    to read them would wait for the device."""
    config = run.config
    set_rate(run.optimizer, rate_at(run.step, config))
    if config.lanes:
        losses = [run_lane(run, micros) for micros in run.model.lanes(lanes, run.step)]
    else:
        if config.dropout:  # masks follow from the step and the rank, so a resumed run draws the same ones
            torch.manual_seed(paceline.randomness.mixed(config.seed, run.step, run.world.rank))
        losses = [run_lane(run, micros) for micros in lanes]
    norm = nn.utils.clip_grad_norm_(run.net.parameters(), config.clip or float("inf"))
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step += 1
    return torch.stack(losses), norm


def run_lane(run: Run, micros: list[Sample]) -> torch.Tensor:
    """Forward and backward of the micros of one lane. Returns its loss."""
    total = torch.zeros((), device=run.device)
    for number, (tokens, targets) in enumerate(micros, start=1):
        with contextlib.nullcontext() if number == len(micros) else run.model.no_sync():
            with torch.autocast(run.device.type, torch.bfloat16, enabled=run.config.dtype == "bf16"):
                loss = run.model(tokens, targets)
            (loss / len(micros)).backward()
            total += loss.detach() / len(micros)
    return total


def asked(preemption: "paceline.Preemption") -> tuple[bool, bool]:
    """Whether this rank was asked to save and stop (SIGTERM), and to save and go on (SIGUSR1)."""
    stop, now = signal.SIGTERM in preemption.signals, signal.SIGUSR1 in preemption.signals
    if now:
        preemption.signals.remove(signal.SIGUSR1)
    return stop, now


def asked_by_any(run: Run, stop: bool, now: bool) -> tuple[bool, bool]:
    """The same of all ranks, in the same step on each. Where a GPU runs ahead of its host they hear it a step later."""
    if run.world.size == 1:
        return stop, now
    votes = run.model.votes
    return bool(votes["stop"]), bool(votes["save"])


def to_device(sample: Sample, device: torch.device) -> Sample:
    if device.type == "cpu":
        return sample
    tokens, targets = (part.pin_memory().to(device, non_blocking=True) for part in sample)
    return tokens, targets


# ---- the parts of a run


def build(config: TrainConfig, folder: RunFolder, world: paceline.World, text: Text) -> Run:
    """Everything, ready for the first step."""
    torch.manual_seed(config.seed)
    net = GPT(config.shape, text.tokenizer.vocabulary, dropout=config.dropout, checkpointing=config.checkpointing)
    net.to(world.device)
    checks = Checks(net, world)
    model: Any = paceline.DistributedDataParallel(
        net,
        transport=config.transport,
        lanes=config.lanes or None,
        seed=config.seed,
        agreement=paceline.Agreement(
            state_every=config.check_every,
            drift=config.on_drift,
            not_finite="skip",
            capsules=folder.capsules,
            about={"train": asdict(config)},
        ),
    )
    parameters = sum(param.numel() for param in net.parameters())
    where = {"ranks": world.size, "lanes": config.lanes, "device": str(world.device)}
    where["samples"], where["context"] = config.samples_of_step(world.size), config.shape.context
    tell("ready", **where, parameters=parameters, source=text.source)
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
            lanes=config.lanes or None,
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
        record=Record(config, folder, world.rank),
        checks=checks,
    )


def adamw(net: GPT, config: TrainConfig) -> torch.optim.Optimizer:
    matrices, vectors = matrices_and_vectors(net)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
