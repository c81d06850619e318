"""Buffers and random number generators, saved at the start of an attempt, which changes them outside the update.

Parameters and optimizer states change in the update only, and gradients are discarded, so none of those are saved.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from paceline.randomness import rng_state, set_rng_state

LARGE_BYTES = 1 << 20  # larger buffers are not copied again if their version has not changed, as with masks
_NORMS = nn.modules.batchnorm._NormBase  # torch's kernels change their buffers without increasing the version


@dataclass(slots=True)
class _KeptBuffer:
    value: torch.Tensor
    version: int
    source: torch.Tensor


class BeforeAttempt:
    """The buffers of some modules and the generators of this process, as they were at the start of the current
    attempt."""

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._modules = modules
        self._device = device
        self._generators: dict[str, object] = {}
        self._kept: dict[tuple[int, str], _KeptBuffer] = {}

    def keep(self) -> None:
        """An attempt begins."""
        self._generators = rng_state(self._device)
        present: set[tuple[int, str]] = set()
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for key, owner, buffer in self._buffers():
            present.add(key)
            kept = self._kept.get(key)
            if kept is None or kept.source is not buffer or kept.value.shape != buffer.shape:
                self._kept[key] = _KeptBuffer(buffer.detach().clone(), buffer._version, buffer)
            elif isinstance(owner, _NORMS) or buffer.nbytes < LARGE_BYTES or kept.version != buffer._version:
                kept.version = buffer._version
                targets.append(kept.value)
                sources.append(buffer.detach())
        for key in self._kept.keys() - present:
            del self._kept[key]
        if targets:
            torch._foreach_copy_(targets, sources)

    def put_back(self) -> None:
        """The attempt has failed: restore what it has changed. A buffer that it replaced is the old one again."""
        set_rng_state(self._generators, self._device)
        owners = {(number, name): owner for number, name, owner in self._owners()}
        with torch.no_grad():
            for key, kept in self._kept.items():
                prefix, _, own_name = key[1].rpartition(".")
                kept.source.detach().copy_(kept.value)
                kept.version = kept.source._version
                owners[key[0], prefix]._buffers[own_name] = kept.source

    def forget(self) -> None:
        """All state was replaced: drop the saved copies."""
        self._kept.clear()

    def _owners(self) -> list[tuple[int, str, nn.Module]]:
        return [(at, name, owner) for at, module in enumerate(self._modules) for name, owner in module.named_modules()]

    def _buffers(self) -> list[tuple[tuple[int, str], nn.Module, torch.Tensor]]:
        return [
            ((at, f"{prefix}.{name}"), owner, buffer)
            for at, prefix, owner in self._owners()
            for name, buffer in owner._buffers.items()
            if buffer is not None and buffer.layout is torch.strided and not buffer.is_meta
        ]
