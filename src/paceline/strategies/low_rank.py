"""Matrices of a few orthonormal columns: the arithmetic of PowerSGD. Batches of shape (matrices, rows, columns)."""

import torch

# Above this, Householder's method (torch.linalg.qr) is faster than one column at a time.
_FEW_COLUMNS = 4
# A column that keeps less than this part of its length, once the others are taken out of it, is rounding error.
_NOTHING_LEFT = 1e-5


def orthonormal(batch: torch.Tensor) -> torch.Tensor:
    """The columns made orthonormal. Columns that depend on those before them are zero where there are few.

    Each matrix is scaled by its largest element first, so that squares of small gradients do not vanish.
    """
    largest = batch.abs().amax(dim=(1, 2), keepdim=True)
    scaled = batch / torch.where(largest > 0, largest, torch.ones_like(largest))
    if batch.shape[2] > _FEW_COLUMNS:
        q: torch.Tensor = torch.linalg.qr(scaled).Q
        return q
    columns: list[torch.Tensor] = []
    for column in scaled.split(1, dim=2):
        length = _length(column)
        rest = column
        for _ in range(2):  # once is not exact enough when columns are nearly parallel
            for before in columns:
                rest = rest - before * (before * rest).sum(dim=1, keepdim=True)
        left = _length(rest)
        keeps = (left > _NOTHING_LEFT * length) | ~torch.isfinite(left)  # a step that is not finite must show
        columns.append(torch.where(keeps, rest / left, torch.zeros_like(rest)))
    return torch.cat(columns, dim=2)


def fresh_where_lost(matrix: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """`matrix` with columns that are zero, or not finite, taken from `fresh`: from zero no product leads back."""
    length = matrix.abs().amax(dim=0, keepdim=True)
    return torch.where((length > 0) & torch.isfinite(length), matrix, fresh)


def _length(column: torch.Tensor) -> torch.Tensor:
    return column.square().sum(dim=1, keepdim=True).sqrt()
