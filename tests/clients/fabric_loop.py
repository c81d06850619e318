"""A loop that is written with Lightning Fabric. Ours is the strategy that the README shows."""

from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from torch import nn

import paceline
from tests.clients.job import EPOCHS, Job, Trained, batches, copied, readme_block, small_model

OURS = paceline.DistributedDataParallel
CHECKPOINT = "fabric.ckpt"


def train(job: Job, ddp: type[nn.Module], save: Path, resume: Path | None) -> Trained:
    ours = readme_block("PacelineFabric")["PacelineFabric"]
    strategy = ours(placement=job.placement) if issubclass(ddp, OURS) else DDPStrategy()
    fabric: Any = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=job.precision)
    fabric.launch()
    net = small_model()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    assert type(model._forward_module) is ddp
    if resume is not None:
        fabric.load(resume, {"model": model, "optimizer": optimizer})
    losses = []
    for epoch in range(0 if resume is None else 1, EPOCHS):
        for number, batch in enumerate(batches(fabric.global_rank, job.microbatches), start=1):
            last = number % job.microbatches == 0
            with fabric.no_backward_sync(model, enabled=not last):
                loss = model(batch).square().mean() / job.microbatches
                losses.append(loss.item())
                fabric.backward(loss)
            if last:
                if job.clip is not None:
                    fabric.clip_gradients(model, optimizer, max_norm=job.clip)
                optimizer.step()
                optimizer.zero_grad()
        if epoch == 0:
            fabric.save(save / CHECKPOINT, {"model": model, "optimizer": optimizer})
    return Trained(copied(net.state_dict()), losses)


def checkpoint(save: Path) -> Path:
    return save / CHECKPOINT
