"""A GPT: pre-norm blocks, one embedding for both ends."""

from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody knows)
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.train.sizes import Shape


class Block(nn.Module):
    """Attention and a perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._drop(self._attend(self.norm1(x)))
        return x + self._drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        mixed: torch.Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return mixed

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(nn.Module):
    """Predicts the next token. With targets it returns the mean loss in nats, without them the logits."""

    def __init__(self, shape: Shape, vocabulary: int, *, dropout: float = 0.0, checkpointing: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads, dropout) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(partial(_start, layers=shape.layers))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing and self.training else block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _start(module: nn.Module, layers: int) -> None:
    """GPT-2's first weights; what adds to the residual stream starts smaller, the deeper the model is."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, Block):
        for last in (module.out, module.down):
            nn.init.normal_(last.weight, std=0.02 / (2 * layers) ** 0.5)
