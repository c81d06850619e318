"""AdamW, and its learning rate: a linear warmup, then half a cosine."""

import math

import torch
from torch import nn

import paceline
from paceline.train.config import TrainConfig


def adamw(model: paceline.DistributedDataParallel, config: TrainConfig) -> torch.optim.Optimizer:
    """Over what this rank owns of the model. Weight decay is for matrices, not for biases and norms."""
    matrices, vectors = matrices_and_vectors(model)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return model.optimizer(torch.optim.AdamW, groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def matrices_and_vectors(net: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    params = list(net.parameters())
    return [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]


def rate_at(step: int, config: TrainConfig) -> float:
    """The learning rate of step `step`, counted from 0. After `decay_steps` it stays at its final value."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, (config.decay_steps or config.steps) - config.warmup)
    low = config.learning_rate * config.final_rate
    return low + 0.5 * (config.learning_rate - low) * (1 + math.cos(math.pi * min(1.0, done)))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def jump_at(step: int, optimizer: torch.optim.Optimizer, config: TrainConfig) -> tuple[float, float] | None:
    """The rates of the step before `step` and of `step`, if the one before was made by another schedule."""
    before = float(optimizer.param_groups[0]["lr"])
    return None if math.isclose(before, rate_at(step - 1, config)) else (before, rate_at(step, config))
