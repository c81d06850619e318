"""The learning rate: up in a line, down in half a cosine."""

import math

import torch

from paceline.train.config import TrainConfig


def rate_at(step: int, config: TrainConfig) -> float:
    """The rate of step `step`, counted from 0. After `decay_steps` it stays what it is."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, (config.decay_steps or config.steps) - config.warmup)
    low = config.learning_rate * config.final_rate
    return low + 0.5 * (config.learning_rate - low) * (1 + math.cos(math.pi * min(1.0, done)))


def jump_at(step: int, optimizer: torch.optim.Optimizer, config: TrainConfig) -> tuple[float, float] | None:
    """The rates of the step before `step` and of `step`, if the one before was made by another schedule."""
    before = float(optimizer.param_groups[0]["lr"])
    return None if math.isclose(before, rate_at(step - 1, config)) else (before, rate_at(step, config))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
