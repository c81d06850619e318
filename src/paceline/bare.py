"""The user's own module, inside of what it is wrapped in."""

from torch import nn


def bare(model: nn.Module) -> nn.Module:
    """The module inside of DistributedDataParallel, torch's or ours, and of torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
