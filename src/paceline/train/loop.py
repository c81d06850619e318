"""The training loop: plain torch, with paceline's class, loader and checkpoints in it.

run_rank()           one rank, from the start to the result
train()              the loop
train_step()         one optimizer step
forward_backward()   forward and backward of one lane
build_run()          the model, the optimizer, the data, the checkpoints
"""

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

import paceline
from paceline.errors import NotFiniteGradients, UsageError
from paceline.progress import Phase, own_progress
from paceline.rank_report import report
from paceline.train.checks import Checks, check_device
from paceline.train.closing import close_run
from paceline.train.config import TrainConfig
from paceline.train.evaluate import held_out_loss
from paceline.train.metrics import RunMetrics, UnreadStep
from paceline.train.model import GPT
from paceline.train.optimizer import adamw, rate_at, set_rate
from paceline.train.run_folder import RunFolder
from paceline.train.run_state import Run, resume, save
from paceline.train.samples import Sample, Text, prepare


def run_rank(config: TrainConfig, folder: RunFolder) -> None:
    """One rank of one run, from the start to the result."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device='cuda', but torch sees no CUDA device here; expected 'cpu' or 'auto'")
    world = paceline.init(device="cpu" if config.device == "cpu" else None)
    if config.lanes and world.device.type == "cuda":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    text = prepare(config, folder.path)
    check_device(config, text, world)
    run = build_run(config, folder, world, text)
    run.elastic = paceline.Elastic(
        model=run.model,
        optimizer=run.optimizer,
        loader=run.loader,
        checkpoints=run.checkpoints,
        begin=partial(begin, run),
    )
    began = time.monotonic()
    with paceline.Preemption() as preemption:
        try:
            ended = train(run, preemption)
        except NotFiniteGradients as error:  # raised on all ranks, and none has stepped with these gradients
            if run.saved_at != run.step:
                save(run)
            run.checkpoints.wait()
            saved = f"{error}. Step {run.step} is saved in {folder.checkpoints}"
            raise NotFiniteGradients(saved, ranks=error.ranks) from error
    run.elastic.finish()
    run.checkpoints.wait()
    close_run(run, ended, time.monotonic() - began)
    run.metrics.close()
    paceline.shutdown()


def train(run: Run, preemption: "paceline.Preemption") -> str:
    """Step until the end, or until some rank is asked to stop. Returns "finished" or "stopped"."""
    assert run.elastic is not None
    batches, asked, generation = run.loader.endless(), {"stop": False, "save": False}, None
    while run.step < run.config.steps and not asked["stop"]:
        if run.elastic.generation != generation:
            generation = run.elastic.generation
            run.metrics.open()
        with run.elastic.attempt():  # losing a rank in here ends it, and the loop continues from run.step
            asked = one_step(run, batches, preemption)
    save_last(run)
    return "stopped" if asked["stop"] else "finished"


def one_step(run: Run, batches: Iterator[Any], preemption: "paceline.Preemption") -> dict[str, bool]:
    """One step, with everything that is due after it. Returns which signals ranks have received."""
    config = run.config
    began = run.metrics.begin_step(run.step + 1)
    own_progress().note(Phase.DATA, run.step)
    lanes = next_microbatches(batches, run)
    data_s = time.perf_counter() - began

    asked = take_signals(preemption)
    run.model.vote(stop=asked["stop"], save=asked["save"])
    losses, norm = train_step(run, lanes)
    if run.world.size > 1:  # by any rank, in the same step on each; a step later where a GPU runs behind its host
        asked = {name: bool(ranks) for name, ranks in run.model.votes.items()}

    own_tokens = sum(tokens.numel() for microbatches in lanes for tokens, _ in microbatches)
    run.metrics.end_step(UnreadStep(run.step, rate_at(run.step - 1, config), losses, norm, data_s, own_tokens))
    saves = asked["stop"] or asked["save"] or run.checkpoints.due(run.step)
    # Also when it stops here: a run that resumes begins with the step after.
    evaluates = bool(config.eval_every) and run.step % config.eval_every == 0 and run.step < config.steps
    if saves or evaluates or run.step == config.steps or run.metrics.due(run.step):
        run.metrics.read()
    assert run.elastic is not None
    run.checks.after_step(config, run.text, begun_together=run.elastic.generation <= 0)
    if saves:
        save(run)
    if evaluates:
        loss = held_out_loss(run)
        run.metrics.held_out(run.step, loss, loss / run.text.bytes_per_token)
    return asked


def save_last(run: Run) -> None:
    """Save the last step, unless all ranks have: a new rank does not know."""
    assert run.elastic is not None
    saved = False
    while not saved:
        with run.elastic.attempt():
            newest = torch.tensor(-1 if run.saved_at is None else run.saved_at, device="cpu")
            if run.world.size > 1:
                paceline.all_reduce(newest, "min")
            if int(newest) != run.step:
                save(run)
            saved = True


def next_microbatches(batches: Iterator[Any], run: Run) -> list[list[Sample]]:
    """The microbatches of one step, for each lane of this rank. Without lanes a rank is like one lane."""
    taken = [next(batches) for _ in range(run.config.accumulate)]
    lanes = zip(*taken, strict=True) if run.config.lanes else [taken]
    return [[to_device(microbatch, run.device) for microbatch in microbatches] for microbatches in lanes]


def train_step(run: Run, lanes: list[list[Sample]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One optimizer step. Returns the loss of each of this rank's lanes and the norm of all gradients.

    Both stay on the device: reading them would wait for it.
    """
    config = run.config
    set_rate(run.optimizer, rate_at(run.step, config))
    if config.lanes:
        losses = [forward_backward(run, microbatches) for microbatches in run.model.lanes(lanes, run.step)]
        del losses[len(lanes) :]  # of another rank's lane, run once more for an audit
    else:
        if config.dropout:  # masks follow from the step and the rank, so a resumed run draws the same ones
            torch.manual_seed(paceline.randomness.mixed(config.seed, run.step, run.world.rank))
        losses = [forward_backward(run, microbatches) for microbatches in lanes]
    norm = run.model.clip_grad_norm_(config.clip or float("inf"))
    assert run.elastic is not None
    with run.elastic.commit():
        run.optimizer.step()
    run.optimizer.zero_grad()
    return torch.stack(losses), norm


def forward_backward(run: Run, microbatches: list[Sample]) -> torch.Tensor:
    """Forward and backward of the microbatches of one lane. Returns its loss."""
    total = torch.zeros((), device=run.device)
    count = len(microbatches)
    for number, (tokens, targets) in enumerate(microbatches, start=1):
        with contextlib.nullcontext() if number == count else run.model.no_sync():
            with torch.autocast(run.device.type, torch.bfloat16, enabled=run.config.dtype == "bf16"):
                loss = run.model(tokens, targets)
            (loss / count).backward()
            total += loss.detach() / count
    return total


def take_signals(preemption: "paceline.Preemption") -> dict[str, bool]:
    """Whether this rank was asked to save and stop (SIGTERM), or to save and go on (SIGUSR1)."""
    asked = {"stop": signal.SIGTERM in preemption.signals, "save": signal.SIGUSR1 in preemption.signals}
    if asked["save"]:
        preemption.signals.remove(signal.SIGUSR1)
    return asked


def to_device(sample: Sample, device: torch.device) -> Sample:
    if device.type == "cpu":
        return sample
    tokens, targets = (part.pin_memory().to(device, non_blocking=True) for part in sample)
    return tokens, targets


# ---- the parts of a run


def build_run(config: TrainConfig, folder: RunFolder, world: paceline.World, text: Text) -> Run:
    """Build everything for the first step."""
    torch.manual_seed(config.seed)
    net = GPT(config.shape, text.tokenizer.vocabulary, dropout=config.dropout, checkpointing=config.checkpointing)
    net.to(world.device)
    checks = Checks(net, world)
    model: Any = paceline.DistributedDataParallel(
        net,
        placement=config.placement,
        shard=config.shard or None,
        copies=config.copies or None,
        transport=config.transport,
        lanes=config.lanes or None,
        seed=config.seed,
        agreement=paceline.Agreement(
            state_every=config.check_every,
            drift=config.on_drift,
            audit_every=config.audit_every,
            not_finite="skip",
            capsules=folder.capsules if config.placement != "zero3" else None,  # they take whole parameters
            about={"train": asdict(config)},
        ),
    )
    return Run(
        config=config,
        folder=folder,
        world=world,
        text=text,
        net=net,
        model=torch.compile(model) if config.compile else model,
        optimizer=adamw(model, config),
        loader=paceline.Loader(
            text.train,
            config.batch,
            lanes=config.lanes or None,
            seed=config.seed,
            manual_commit=True,  # a step may take several batches
            reseed=False,  # reading a sample draws no random numbers
            sample_log=folder.path / "sample_log" if config.audit else None,
        ),
        checkpoints=paceline.Checkpointer(
            folder.checkpoints,
            keep=config.keep,
            every_steps=config.save_every or None,
            every_seconds=config.save_seconds or None,
        ),
        metrics=RunMetrics(config, folder, world, model),
        checks=checks,
    )


def begin(run: Run, fresh: bool) -> int | None:
    """All ranks call it when none of them has a state: load a checkpoint if there is one. Returns its step. `fresh`: no
    rank has trained yet."""
    config, world = run.config, run.world
    parameters = sum(param.numel() for param in run.net.parameters())
    where = {"ranks": world.size, "lanes": config.lanes, "placement": config.placement}
    where |= {"shard": config.shard_size(world.size), "device": str(world.device), "context": config.shape.context}
    where["samples"] = config.samples_of_step(world.size)
    report("ready", **where, parameters=parameters, source=run.text.source)
    return resume(run, fresh=fresh)
