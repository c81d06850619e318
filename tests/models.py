"""Small models and their data, shared by tests. Values come from explicit generators: threads share the global one."""

import io
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.nn import functional

import paceline

# Tests reach through replicas into modules of every kind, which no type describes.
DDP: Any = paceline.DistributedDataParallel

# Optimizers have masters of their parameters where a tensor may have a gradient of another type.
needs_masters = pytest.mark.skipif(not hasattr(torch.empty(0), "grad_dtype"), reason="needs Tensor.grad_dtype")

M = TypeVar("M", bound=nn.Module)
Grads = dict[str, torch.Tensor | None]


def draw(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers that depend on `seed` alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(GPT.VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def seeded(module: M, seed: int = 0) -> M:
    """`module` with parameters and floating buffers drawn from `seed`, whatever they were."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.copy_(0.5 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))
    return module


def mlp(*widths: int, seed: int = 0) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return seeded(nn.Sequential(*layers[:-1]), seed)


class Branches(nn.Module):
    """A trunk and two branches. `uses` names the layers that take part: "ta" is the trunk and branch a."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.t = nn.Linear(width, width)
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
        seeded(self)

    def forward(self, x: torch.Tensor, uses: str = "tab") -> torch.Tensor:
        for name in uses:
            x = torch.tanh(self.get_submodule(name)(x))
        return x

    def other_way(self, x: torch.Tensor) -> Any:
        """A method of the model's own, as models for generation have them."""
        return self(x, "tab") * 2


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> Any:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Learns to repeat its input; the output layer is the embedding, transposed."""

    VOCABULARY = 32

    def __init__(self, *, width: int = 32, depth: int = 2, length: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(self.VOCABULARY, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.VOCABULARY, bias=False)
        self.head.weight = self.words.weight
        seeded(self)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def grads(module: nn.Module) -> Grads:
    """Copies of the gradients by name, None where there is none."""
    return {
        name.removeprefix("module."): None if param.grad is None else param.grad.detach().clone()
        for name, param in module.named_parameters()
    }


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): value.clone() for name, value in module.state_dict().items()}


def packed(tensors: Mapping[str, torch.Tensor | None]) -> bytes:
    """Tensors as a process of the pool can send them."""
    buffer = io.BytesIO()
    torch.save(dict(tensors), buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Grads:
    tensors: Grads = torch.load(io.BytesIO(data))
    return tensors


def mean_grads(module: M, loss: Callable[[M, int], torch.Tensor], size: int) -> Grads:
    """What `size` ranks should end with: each rank's gradient times 1 / `size`, as torch does it, added in rank order.

    `loss(module, rank)` is run once per rank. A parameter that no rank used has None.
    """
    total: Grads = {name: None for name, _ in module.named_parameters()}
    for rank in range(size):
        module.zero_grad()
        out = loss(module, rank)
        if out.requires_grad:
            out.backward()
        for name, grad in grads(module).items():
            if grad is not None:
                share, so_far = grad * (1.0 / size), total[name]
                total[name] = share if so_far is None else so_far + share
    module.zero_grad()
    return total


def assert_same_bits(got: Grads, expected: Grads) -> None:
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        have = got[name]
        if wanted is None or have is None:
            assert wanted is have, f"{name}: got {have}, expected {wanted}"
        else:
            assert torch.equal(have.to_dense(), wanted.to_dense()), f"{name}: got {have}, expected {wanted}"


def assert_close(got: Grads, expected: Grads, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert {name for name, grad in got.items() if grad is None} == {n for n, grad in expected.items() if grad is None}
    for name, wanted in expected.items():
        have = got[name]
        if wanted is not None and have is not None:
            assert torch.allclose(have, wanted, rtol=rtol, atol=atol), f"{name}: got {have}, expected {wanted}"
