"""Gradients move: to buckets of another layout, or into memory of another transport."""

from typing import TYPE_CHECKING

from paceline.collectives.protocols import Transport

if TYPE_CHECKING:
    from paceline.reducer.buckets import BucketSet


def move_gradients(buckets: "BucketSet", transport: Transport) -> None:
    """Reallocate the buckets. Gradients that are views move along."""
    moved = [(slot, slot.view) for slot in buckets.slots if slot.attached()]
    if not moved:  # then old and new buckets need not exist together
        buckets.buckets.clear()
        for slot in buckets.slots:
            slot.leave_bucket()
    buckets.allocate(transport)
    for slot, old_view in moved:
        slot.view.copy_(old_view)
        slot.param.grad = slot.view
