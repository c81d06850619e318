"""torch's options for an `Op`."""

from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import AllreduceOptions, ReduceScatterOptions

from paceline.collectives.protocols import Op

_REDUCE_OPS: dict[Op, Any] = {
    Op.SUM: dist.ReduceOp.SUM,
    Op.MEAN: dist.ReduceOp.AVG,
    Op.TREE: dist.ReduceOp.SUM,  # where `Traits.tree_sum` allows it
    Op.PRODUCT: dist.ReduceOp.PRODUCT,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
}


def reduce_options(op: Op, backend: str) -> tuple[AllreduceOptions, bool]:
    """torch's options for `op`, and whether the sum must still be divided: only NCCL computes a mean itself."""
    divides = op is Op.MEAN and backend != "nccl"
    options = AllreduceOptions()
    options.reduceOp = _REDUCE_OPS[Op.SUM if divides else op]
    return options, divides


def scatter_options(op: Op, backend: str) -> tuple[ReduceScatterOptions, bool]:
    """The same for a reduce_scatter."""
    of_all, divides = reduce_options(op, backend)
    options = ReduceScatterOptions()
    options.reduceOp = of_all.reduceOp
    return options, divides
