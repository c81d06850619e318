"""A loop that is written with Accelerate."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

from tests.clients.job import EPOCHS, Job, Trained, batches, copied, in_the_place_of_torchs, sharded, small_model


@contextmanager
def accelerator_for(job: Job) -> Iterator[Any]:
    precision = "bf16" if job.precision == "bf16-mixed" else "no"
    try:
        yield Accelerator(cpu=True, gradient_accumulation_steps=job.microbatches, mixed_precision=precision)
    finally:
        forget()


def forget() -> None:
    """Accelerate keeps what it was told, for the whole process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def train(job: Job, ddp: type[nn.Module], save: Path, resume: Path | None) -> Trained:
    ddp = sharded(ddp, job.placement)
    with in_the_place_of_torchs(ddp), accelerator_for(job) as accelerator:
        net = small_model()
        if job.placement == "ddp":
            model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
        else:
            model = accelerator.prepare(net)
            optimizer = accelerator.prepare(model.optimizer(torch.optim.AdamW, lr=0.01))
        assert type(model) is ddp
        if resume is not None:
            accelerator.load_state(str(resume))
        losses = []
        for epoch in range(0 if resume is None else 1, EPOCHS):
            for batch in batches(accelerator.process_index, job.microbatches):
                with accelerator.accumulate(model):
                    loss = model(batch).square().mean()
                    losses.append(loss.item())
                    accelerator.backward(loss)
                    if job.clip is not None and accelerator.sync_gradients:
                        clip(job, accelerator, model)
                    optimizer.step()
                    optimizer.zero_grad()
            if epoch == 0:
                accelerator.save_state(str(save))
                accelerator.wait_for_everyone()
        assert accelerator.unwrap_model(model) is net
        assert accelerator.get_state_dict(model).keys() == net.state_dict().keys()
        return Trained(copied(net.state_dict()), losses)


def clip(job: Job, accelerator: Any, model: Any) -> None:
    if job.placement == "ddp":
        accelerator.clip_grad_norm_(model.parameters(), job.clip)
    else:
        accelerator.unscale_gradients()
        model.clip_grad_norm_(job.clip)


def checkpoint(save: Path) -> Path:
    return save
