"""Small gradients that wait for each other and are copied into their bucket by one call."""

from typing import Protocol

import torch

SMALL_BYTES = 64 * 1024  # up to here a call costs more than the copy it makes
TOGETHER = 64  # at most so many wait, so that they are still in the cache


class Place(Protocol):
    """Where a gradient goes."""

    view: torch.Tensor
    address: int  # of the view, unless someone gave it other memory


class Arrivals:
    """What has come for one bucket and is not in its memory yet. The bucket holds it: nobody else knows of it."""

    __slots__ = ("_exact", "_grads", "_high", "_low", "_places", "scale")

    def __init__(self, flat: torch.Tensor) -> None:
        self._places: list[Place] = []
        self._grads: list[torch.Tensor] = []
        self.scale = 1.0  # by what all of them are multiplied
        self._low = flat.data_ptr()
        self._high = self._low + flat.nbytes
        # Products of several bfloat16 tensors at once are rounded another way than those of one.
        self._exact = flat.dtype in (torch.float32, torch.float64)

    def admit(self, place: Place, grad: torch.Tensor, scale: float) -> bool:
        """Let a gradient wait here. False: it is of another kind than those that wait, and has to be copied alone."""
        if (
            scale != self.scale
            or grad.layout is not torch.strided
            or self._low <= grad.data_ptr() < self._high  # another look at the bucket's own memory
            or place.view.data_ptr() != place.address
        ):
            return False
        self._places.append(place)
        self._grads.append(grad)
        if len(self._grads) == TOGETHER:
            self.copy()
        return True

    def start(self, scale: float) -> None:
        """From now on gradients are multiplied by `scale`. None may wait."""
        assert not self._grads
        if scale == 1.0 or (self._exact and scale != 0.0):
            self.scale = scale

    def drop(self) -> None:
        self._places.clear()
        self._grads.clear()

    def __bool__(self) -> bool:
        return bool(self._grads)

    def copy(self) -> None:
        """Copy all to their places, on the current stream."""
        views = [place.view for place in self._places]
        torch._foreach_copy_(views, self._grads)
        if self.scale != 1.0:
            torch._foreach_mul_(views, self.scale)
        self.drop()
