"""Shapes of GPTs by name."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A GPT without its vocabulary."""

    layers: int
    width: int
    heads: int
    context: int


SIZES = {
    "nano": Shape(2, 64, 2, 64),
    "tiny": Shape(4, 128, 4, 128),
    "small": Shape(6, 256, 8, 256),
    "medium": Shape(8, 512, 8, 512),
    "gpt2": Shape(12, 768, 12, 1024),
    "gpt2-medium": Shape(24, 1024, 16, 1024),
    "gpt2-large": Shape(36, 1280, 20, 1024),
    "gpt2-xl": Shape(48, 1600, 25, 1024),
}
