"""Part of a tensor that ranks hold in parts: so many elements, from one of them on."""

from dataclasses import dataclass

import torch

Order = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TensorPart:
    """The elements of a tensor like `form` from `begin` on, in the order of its memory."""

    values: torch.Tensor  # flat
    begin: int
    form: torch.Tensor  # without memory: shape and strides of the whole

    @property
    def shape(self) -> torch.Size:
        return self.form.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def span(self) -> tuple[int, int]:
        return self.begin, self.begin + self.values.numel()


def order_of(tensor: torch.Tensor) -> Order | None:
    """The dimensions of a tensor in the order of its memory. None: it is not one dense block."""
    natural = tuple(range(tensor.dim()))
    if tensor.is_contiguous():
        return natural
    found = tuple(sorted(natural, key=lambda dim: (-tensor.stride()[dim], dim)))
    return found if tensor.permute(found).is_contiguous() else None


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory, without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def in_order(flat: torch.Tensor, shape: torch.Size, order: Order) -> torch.Tensor:
    """The tensor of this shape whose elements are in memory in this order of its dimensions."""
    back = sorted(range(len(order)), key=order.__getitem__)
    return flat.view([shape[dim] for dim in order]).permute(back)
