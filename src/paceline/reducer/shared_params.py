"""Parameters that several replicas hold: the one that was created or called last reduces such a parameter.

The replicas find each other by their hooks on the parameter.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from paceline.reducer.bucket import GradSlot
    from paceline.reducer.reducer import Reducer


def hook_owners(param: torch.Tensor) -> Iterator[Any]:
    """The objects whose methods are hooked to `param`, oldest first; None for hooks that are plain functions."""
    for hook in list((param._post_accumulate_grad_hooks or {}).values()):
        yield getattr(hook, "__self__", None)


def has_shared(reducer: "Reducer") -> bool:
    """Whether another replica has hooked some of the parameters."""
    slots = reducer.bucket_set.slots
    return any(_others(reducer, slot) for slot in slots if slot.param._post_accumulate_grad_hooks)


def claim(reducer: "Reducer") -> None:
    """Take the parameters over from the other replicas that hold them."""
    for slot in reducer.bucket_set.slots:
        for other in _others(reducer, slot):
            other.owned_elsewhere = True
            if other.attached():  # its bucket remains in use for other parameters
                slot.param.grad = other.view.clone()
        slot.owned_elsewhere = False


def leave(reducer: "Reducer") -> None:
    """Leave shared parameters to the most recent other replica."""
    for slot in reducer.bucket_set.slots:
        others = _others(reducer, slot)
        if others and not slot.owned_elsewhere:
            others[-1].owned_elsewhere = False


def _others(reducer: "Reducer", slot: "GradSlot") -> "list[GradSlot]":
    """The slots of other replicas for the same parameter."""
    owners = hook_owners(slot.param)
    return [
        owner.bucket_set.slot_of[id(slot.param)]
        for owner in owners
        if isinstance(owner, type(reducer)) and owner is not reducer
    ]
