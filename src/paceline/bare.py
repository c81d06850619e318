"""The user's own module without its wrappers."""

from torch import nn


def bare(model: nn.Module) -> nn.Module:
    """Unwrap DistributedDataParallel (torch's or ours) and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
