"""Gradients that arrived after their bucket had been launched: they are reduced in a second round, and added."""

from collections.abc import Sequence

import torch

from paceline.collectives.group import Group
from paceline.reducer.bucket import GradSlot
from paceline.reducer.step import Division


def reduce_late(slots: Sequence[GradSlot], group: Group, scale: float) -> None:
    """Reduce what nested backwards delivered after the launch, and add it. All ranks call it, or none."""
    transport = group.transport
    flags = torch.tensor([slot.late for slot in slots], dtype=torch.int32, device="cpu")
    group.wait(transport.all_reduce(flags), "the list of late gradients")
    for slot, flag in zip(slots, flags.tolist(), strict=True):
        if not flag:
            continue
        grad, extra = slot.param.grad, torch.zeros_like(slot.view)  # equal dtype on all ranks, whatever the gradient's
        if grad is not None and scale != 0.0:  # not a product: see single_gradient.move_in
            extra = extra + grad * scale if slot.meta.sparse else extra.add_(grad, alpha=scale)
        group.wait(transport.all_reduce(extra), f"the late gradient of {slot.meta.name}")
        slot.param.grad = None
        if slot.meta.sparse:
            slot.bucket.store_result(slot.bucket.flat + extra)
        elif slot.bucket.shards is not None:
            slot.bucket.shards.add(slot.index, extra)
        else:
            slot.view.add_(extra)


def scale_of_late(weight: float | None, division: Division) -> float:
    """The factor for late gradients: they are summed separately, after the reduction and before the division.
    `weight`: that of their backward, if it has one."""
    if division.by_reduction:
        return (1.0 if weight is None else weight) / division.size
    return 1.0 / division.divisor if weight is None else weight


def drop_late(slots: Sequence[GradSlot]) -> None:
    """No rank has gradients of this reduction."""
    for slot in slots:
        if slot.late:
            slot.param.grad = None
