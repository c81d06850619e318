"""A module that was converted after it was wrapped, as by `module.double()`: its gradients are of the new type too."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import UsageError
from paceline.layout import ParamMeta
from paceline.reducer.bucket import GradSlot


def follow_conversion(slots: Sequence[GradSlot], *, sharded: bool) -> list[ParamMeta]:
    """Update the parameters' metadata, and return it for a new layout."""
    if sharded:
        meta, dtype = next((slot.meta, slot.param.dtype) for slot in slots if slot.param.dtype is not slot.meta.dtype)
        raise UsageError(
            f"{meta.name} was converted from {meta.dtype} to {dtype} after wrapping, but this rank's shards of it were "
            f"not; convert the module before wrapping it"
        )
    for slot in slots:
        param = slot.param
        slot.meta = replace(slot.meta, dtype=param.dtype, device=param.device, stride=tuple(param.stride()))
    return [slot.meta for slot in slots]
