"""Sparse gradients: the rows of all ranks."""

from collections.abc import Generator

import torch

from paceline.collectives.protocols import Op, Transport, Work
from paceline.collectives.reduction import Flight

Rows = tuple[torch.Tensor, torch.Tensor]  # row numbers, and one row of values for each


def mean_of_rows(sparse: torch.Tensor, transport: Transport) -> Flight:
    """The plain mean, for reductions that cannot compress rows."""
    return Flight(transport.all_reduce(sparse, Op.SUM), lambda: sparse / transport.size)


def gather_rows(own: torch.Tensor, transport: Transport) -> Generator[Work, None, list[Rows]]:
    """The rows of every rank's coalesced gradient, in rank order. Ranks may have different numbers of them."""
    rows, values = own.indices()[0], own.values()
    counts = torch.empty(transport.size, dtype=torch.int64, device=own.device)
    yield transport.all_gather(counts, torch.tensor([len(rows)], device=own.device))
    each: list[int] = counts.tolist()
    most = max(each)
    if most == 0:
        return [(rows, values)] * transport.size
    all_rows = rows.new_empty(transport.size, most)
    yield transport.all_gather(all_rows.view(-1), _longer(rows, most))
    all_values = values.new_empty(transport.size, most, *values.shape[1:])
    yield transport.all_gather(all_values.view(-1), _longer(values, most).reshape(-1))
    return [(all_rows[rank, :count], all_values[rank, :count]) for rank, count in enumerate(each)]


def _longer(tensor: torch.Tensor, length: int) -> torch.Tensor:
    longer = tensor.new_zeros(length, *tensor.shape[1:])
    longer[: len(tensor)] = tensor
    return longer
