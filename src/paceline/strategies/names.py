"""The built-in reductions by name, for a caller that reads its choice from text."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from paceline.collectives.reduction import Mean
from paceline.collectives.reduction_protocol import Reduction
from paceline.errors import UsageError
from paceline.strategies.cast import Wide, Wire
from paceline.strategies.fixed_order import FixedOrder
from paceline.strategies.power_sgd import PowerSGD
from paceline.strategies.top_k import TopK

NAMES: Mapping[str, Callable[[], Reduction]] = MappingProxyType(
    {
        "mean": Mean,
        "bf16": lambda: Wire(torch.bfloat16),
        "fp16": lambda: Wire(torch.float16),
        "fp32": Wide,
        "powersgd": PowerSGD,
        "topk": TopK,
        "fixed-order": FixedOrder,
    }
)


def by_name(name: str) -> Reduction:
    """A new reduction with its default settings, as `DistributedDataParallel(reduction=...)` takes it."""
    if name not in NAMES:
        raise UsageError(f"expected the name of a reduction, one of {', '.join(NAMES)}; got {name!r}")
    return NAMES[name]()
