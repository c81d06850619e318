"""Models and numbers whose bits are the same on every x86-64 machine with AVX2.

Every operation is elementwise and rounded once, as IEEE 754 says. There is no matrix product, no sum over many elements
and no broadcast (its gradient is such a sum): kernels add these in an order that depends on the processor. Where a
product is added, its factor is a power of two, so that it does not matter whether a kernel rounds in between. What is
left are the weights of microbatches and the squares of Adam: float32 and float64 are multiplied and added at once
where there is AVX2, whatever the length of the vectors. In bfloat16 torch's kernels do so only in the body of a tensor
and not at its end, so there are no weights in bfloat16 here.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 100  # no multiple of any vector's length, nor of the number of ranks


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Fractions between about -1 and 1 that depend on `seed` alone. Sums of them are rounded in every order anew."""
    state, found = (seed * 2654435761 + 12345) % 2**32, []
    for _ in range(math.prod(shape)):
        state = (state * 1664525 + 1013904223) % 2**32
        found.append((state >> 8) % 1999 - 999)
    return (torch.tensor(found, dtype=torch.float64) / 997).to(dtype).view(shape)


def folded(values: torch.Tensor) -> torch.Tensor:
    """The sum, by adding halves: one order for all machines."""
    while len(values) > 1:
        half = len(values) // 2
        rest = values[2 * half :]
        values = torch.cat([values[:half] + values[half : 2 * half], rest])
    return values[0]


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    away = out - target
    return folded(away * away) * 0.125


def room(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


class Net(nn.Module):
    """Multiplies and adds, with parameters of several shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = room(WIDTH)
        self.shift = room(4, WIDTH // 4)
        self.part = room(33)
        self.first = room(1)

    def forward(self, x: torch.Tensor, turn: int) -> torch.Tensor:
        h = self.more(x * self.scale + self.shift.view(-1), x, turn)
        return torch.cat([h[:1] * self.first, h[1:34] * self.part, h[34:WIDTH]])

    def more(self, h: torch.Tensor, x: torch.Tensor, turn: int) -> torch.Tensor:
        """What kinds of models do beside this. `turn` tells microbatches apart: see `Trainee.backward`."""
        return h


class Unused(Net):
    """One parameter takes part in some microbatches, and one in none."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes, self.never = room(WIDTH), room(7)

    def more(self, h: torch.Tensor, x: torch.Tensor, turn: int) -> torch.Tensor:
        step, place = turn // 1000, turn // 10 % 100
        return h + x * self.sometimes if (step + place) % 2 else h


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fixed = room(WIDTH).requires_grad_(False)

    def more(self, h: torch.Tensor, x: torch.Tensor, turn: int) -> torch.Tensor:
        return h * self.fixed


class Shared(Net):
    """One parameter under two names, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.scale

    def more(self, h: torch.Tensor, x: torch.Tensor, turn: int) -> torch.Tensor:
        return h * self.again


class Sparse(Net):
    """Rows of a table; every microbatch uses one of its five twice, and ranks use different ones."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(11, WIDTH // 5, sparse=True)

    def more(self, h: torch.Tensor, x: torch.Tensor, turn: int) -> torch.Tensor:
        ids = torch.tensor([(turn + offset) % 11 for offset in (0, 3, 4, 0, 7)])
        found: torch.Tensor = self.rows(ids)
        return h + found.view(-1)


class Empty(Net):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = room(0, 3)

    def more(self, h: torch.Tensor, x: torch.Tensor, turn: int) -> torch.Tensor:
        return torch.cat([h, self.nothing.view(-1)])


class Buffers(Net):
    """What it has seen changes what it computes."""

    trail: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("trail", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def more(self, h: torch.Tensor, x: torch.Tensor, turn: int) -> torch.Tensor:
        with torch.no_grad():
            self.trail.mul_(0.75).add_(x, alpha=0.25)
            self.count.add_(1)
        return h + self.trail


class Noise(Net):
    """Draws random numbers."""

    def more(self, h: torch.Tensor, x: torch.Tensor, turn: int) -> torch.Tensor:
        return h * torch.rand(h.shape).to(h.dtype)


class Dtypes(Net):
    """Parameters of three types, so buckets of three types."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = room(41, dtype=torch.float64), room(WIDTH - 41, dtype=torch.bfloat16)

    def more(self, h: torch.Tensor, x: torch.Tensor, turn: int) -> torch.Tensor:
        wide, narrow = h[:41].double() * self.wide, h[41:].bfloat16() * self.narrow
        return torch.cat([wide.to(h.dtype), narrow.to(h.dtype)])


class Reentrant(Net):
    """Reentrant checkpoints of a weight that is used twice. If its bucket is small, the second gradient comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = room(WIDTH)

    def more(self, h: torch.Tensor, x: torch.Tensor, turn: int) -> torch.Tensor:
        for _ in range(2):
            h = checkpoint(self.inner, h, use_reentrant=True)
        return h

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.middle


MODELS: dict[str, Callable[[], Net]] = {
    "plain": Net,
    "unused": Unused,
    "frozen": Frozen,
    "shared": Shared,
    "sparse": Sparse,
    "empty": Empty,
    "buffers": Buffers,
    "noise": Noise,
    "dtypes": Dtypes,
    "reentrant": Reentrant,
}


def build(kind: str = "plain", dtype: torch.dtype = torch.float32, seed: int = 0) -> Net:
    """A model with values that depend on `seed` alone."""
    model = MODELS[kind]()
    if dtype is not torch.float32:
        model = model.to(dtype)
    with torch.no_grad():
        for number, tensor in enumerate([*model.parameters(), *model.buffers()]):
            if tensor.is_floating_point():
                tensor.copy_(numbers(10**6 + 100 * seed + number, *tensor.shape, dtype=tensor.dtype))
    return model
