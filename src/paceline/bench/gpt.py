"""The model, the data and the optimizer that every contender trains."""

from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody knows)
from torch import nn

from paceline.bench.spec import GPTShape, StepSpec

Batch = tuple[torch.Tensor, torch.Tensor]


class BenchBlock(nn.Module):
    """Attention and a perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, 2)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        down: torch.Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + down


class BenchGPT(nn.Module):
    """A small GPT with an output head of its own. It returns its loss."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(BenchBlock(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1).float(), y.flatten())


def build_model(spec: StepSpec, device: torch.device) -> BenchGPT:
    """The same weights in every process."""
    torch.manual_seed(spec.seed)
    dtype: torch.dtype = getattr(torch, spec.shape.dtype)
    model = BenchGPT(spec.shape).to(device=device, dtype=dtype)
    return cast(BenchGPT, torch.compile(model)) if spec.compile else model


def build_optimizer(spec: StepSpec, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=spec.learning_rate, fused=True)


def rank_batches(spec: StepSpec, device: torch.device, rank: int, step: int) -> list[Batch]:
    """The microbatches of one rank in one step."""
    shape = spec.shape
    source = torch.Generator().manual_seed(spec.seed * 1_000_003 + step * 1009 + rank)
    sizes = (spec.accumulate, spec.micro_batch, shape.context + 1)
    text = torch.randint(shape.vocabulary, sizes, generator=source).to(device)
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in text]


def global_batches(spec: StepSpec, device: torch.device, step: int) -> list[Batch]:
    """The microbatches of one step with those of all ranks side by side, for contenders that are one process."""
    ranks = [rank_batches(spec, device, rank, step) for rank in range(spec.ranks)]
    return [(torch.cat([x for x, _ in same]), torch.cat([y for _, y in same])) for same in zip(*ranks, strict=True)]
