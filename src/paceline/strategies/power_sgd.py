"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): matrices of gradients travel as products of thin ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from paceline.collectives.protocols import Op, Transport
from paceline.collectives.reduction import Flight, GradBucket
from paceline.errors import UsageError
from paceline.strategies.memory import ParamMemory, clear_unless_finite
from paceline.strategies.multi_step import SteppedWork, Steps
from paceline.strategies.sparse import mean_of_rows

# Above this, Householder's method (torch.linalg.qr) is faster than one column at a time.
_FEW_COLUMNS = 4
# A column that keeps less than this fraction of its length after the others are projected out is rounding error.
_NOTHING_LEFT = 1e-5


class _Remembered:
    """The memory of one parameter from earlier steps."""

    __slots__ = ("error", "number", "q", "steps")

    def __init__(self, number: int) -> None:
        self.number = number  # in the order of first use, which is equal on all ranks
        self.steps = 0
        self.error: torch.Tensor | None = None  # the accumulated error
        self.q: torch.Tensor | None = None


@dataclass(slots=True)
class _Matrix:
    """One gradient being compressed: view ≈ p @ q.T."""

    view: torch.Tensor
    full: torch.Tensor  # the gradient plus the accumulated error, as a matrix
    known: _Remembered
    columns: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return (*self.full.shape, self.columns)


@dataclass(frozen=True, eq=False)
class PowerSGD:
    """The mean of gradients, compressed to matrices of rank `rank`. Each rank and replica needs its own.

    Two small collectives per bucket: `rank · (rows + columns)` numbers for each matrix, in float32 at least. Tensors
    that would not shrink by `min_compression` (vectors above all) are sent whole, with the first collective.

    Args:
        rank: number of columns of the thin matrices: more is more exact, and more bytes. start_step: the first steps,
        in which gradients change fast, are plain means. error_feedback: add the error of a step to the next one. Costs
        one more copy of the gradients. warm_start: begin each step with the matrices of the last one, which is more
        exact than random ones. min_compression: a matrix is compressed if that makes it smaller by more than this
        factor. seed: of the first random matrices, equal on all ranks.
    """

    rank: int = 1
    start_step: int = 10
    error_feedback: bool = True
    warm_start: bool = True
    min_compression: float = 2.0
    seed: int = 0
    memory: ParamMemory[_Remembered] = field(default_factory=ParamMemory, init=False, repr=False)

    multi_step = True
    trivial_alone = False

    def __post_init__(self) -> None:
        if self.rank < 1 or self.start_step < 0 or not self.min_compression > 0:
            raise UsageError(
                f"expected PowerSGD with a rank of 1 or more, a start_step of 0 or more and a min_compression above 0, "
                f"got rank={self.rank}, start_step={self.start_step}, min_compression={self.min_compression}"
            )

    def divides(self, transport: Transport, device: torch.device) -> bool:
        return True

    def forget(self) -> None:
        """Reset. When the ranks of a group change, all of them must do so, because they have to agree on the memory."""
        self.memory.clear()

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        flat = bucket.buffer()
        if flat.layout is not torch.strided:
            return mean_of_rows(flat, transport)
        matrices, whole = self._sort(bucket)
        if not matrices:
            return Flight(transport.all_reduce(flat, Op.MEAN))
        return Flight(SteppedWork(self._reduce(matrices, whole, transport)))

    def _sort(self, bucket: GradBucket) -> tuple[list[_Matrix], list[torch.Tensor]]:
        """The gradients to compress, those of one shape side by side, and the others."""
        matrices: list[_Matrix] = []
        whole: list[torch.Tensor] = []
        for param, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
            columns = self._columns(view)
            known = self.memory.of(param, lambda: _Remembered(len(self.memory)))
            known.steps += 1
            if columns and known.steps > self.start_step:
                matrices.append(_Matrix(view, self._with_error(view, known), known, columns))
            else:
                whole.append(view)
        return sorted(matrices, key=lambda matrix: matrix.shape), whole

    def _columns(self, view: torch.Tensor) -> int:
        """The number of columns of the thin matrices of `view`; 0 if it is sent whole."""
        if view.dim() < 2 or view.is_complex() or view.numel() == 0:
            return 0
        rows, columns = view.shape[0], view.numel() // view.shape[0]
        thin = min(self.rank, rows, columns)
        return thin if thin * (rows + columns) * self.min_compression < rows * columns else 0

    def _with_error(self, view: torch.Tensor, known: _Remembered) -> torch.Tensor:
        """The gradient plus the accumulated error, in the error's memory, so that no third copy is needed."""
        wide = torch.promote_types(view.dtype, torch.float32)
        matrix = view.reshape(view.shape[0], -1)
        if not self.error_feedback:
            return matrix.to(wide, copy=True)
        if known.error is None or known.error.shape != matrix.shape:
            known.error = torch.zeros(matrix.shape, dtype=wide, device=view.device)
        known.error = known.error.to(device=view.device, dtype=wide)
        return known.error.add_(matrix)

    def _first_q(self, matrix: _Matrix) -> torch.Tensor:
        """Equal on all ranks: random, or the one of the last step."""
        known, full = matrix.known, matrix.full
        shape = (full.shape[1], matrix.columns)
        generator = torch.Generator(device="cpu")
        step = 0 if self.warm_start else known.steps
        generator.manual_seed((self.seed * 1_000_003 + known.number) * 1_000_003 + step)
        fresh = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(full)
        if known.q is None or known.q.shape != shape:
            return fresh
        return fresh_where_lost(known.q.to(full), fresh)

    def _reduce(self, matrices: list[_Matrix], whole: Sequence[torch.Tensor], transport: Transport) -> Steps:
        like = matrices[0].full
        whole_numel = sum(view.numel() for view in whole)
        p_numel = sum(matrix.full.shape[0] * matrix.columns for matrix in matrices)
        sent = torch.empty(whole_numel + p_numel, dtype=like.dtype, device=like.device)
        for view, place in _places(sent, whole):
            place.copy_(view)
        ps = sent[whole_numel:]
        qs = torch.cat([self._first_q(matrix).reshape(-1) for matrix in matrices])
        for batch, p, q in _batches(matrices, ps, qs):
            q.copy_(orthonormal(q))
            for matrix, one_p, one_q in zip(batch, p, q, strict=True):
                torch.mm(matrix.full, one_q, out=one_p)
        yield transport.all_reduce(sent, Op.MEAN)

        for view, place in _places(sent, whole):
            view.copy_(place)
        for batch, p, q in _batches(matrices, ps, qs):
            p.copy_(orthonormal(p))
            for matrix, one_p, one_q in zip(batch, p, q, strict=True):
                torch.mm(matrix.full.t(), one_p, out=one_q)
        yield transport.all_reduce(qs, Op.MEAN)

        for batch, p, q in _batches(matrices, ps, qs):
            for matrix, one_p, one_q in zip(batch, p, q, strict=True):
                self._finish(matrix, one_p, one_q)

    def _finish(self, matrix: _Matrix, p: torch.Tensor, q: torch.Tensor) -> None:
        view, full = matrix.view, matrix.full
        if view.is_contiguous() and view.dtype == full.dtype:
            torch.mm(p, q.t(), out=view.view(full.shape))
        else:
            view.copy_(torch.mm(p, q.t(), out=torch.empty_like(full)).view(view.shape))
        if self.error_feedback:
            full.sub_(view.reshape(full.shape))  # the view, with its rounding
            clear_unless_finite(p.sum() + q.sum(), full)
        matrix.known.q = q.clone() if self.warm_start else None


def _places(flat: torch.Tensor, views: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each view with its place in `flat`."""
    start = 0
    for view in views:
        yield view, flat[start : start + view.numel()].view(view.shape)
        start += view.numel()


def _batches(
    matrices: Sequence[_Matrix], ps: torch.Tensor, qs: torch.Tensor
) -> Iterator[tuple[list[_Matrix], torch.Tensor, torch.Tensor]]:
    """Matrices of one shape, with their p and q as batches: orthogonalised together, they cost as much as one."""
    p_start = q_start = 0
    for (rows, columns, thin), group in groupby(matrices, key=lambda matrix: matrix.shape):
        batch = list(group)
        p_end, q_end = p_start + len(batch) * rows * thin, q_start + len(batch) * columns * thin
        yield batch, ps[p_start:p_end].view(-1, rows, thin), qs[q_start:q_end].view(-1, columns, thin)
        p_start, q_start = p_end, q_end


def orthonormal(batch: torch.Tensor) -> torch.Tensor:
    """The columns of a batch of matrices, of shape (matrices, rows, columns), made orthonormal.

    Linearly dependent columns become zero if there are few columns.

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
        keeps = (left > _NOTHING_LEFT * length) | ~torch.isfinite(left)  # a non-finite step must remain visible
        columns.append(torch.where(keeps, rest / left, torch.zeros_like(rest)))
    return torch.cat(columns, dim=2)


def fresh_where_lost(matrix: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """`matrix` with columns that are zero, or not finite, taken from `fresh`: a zero column would stay zero."""
    length = matrix.abs().amax(dim=0, keepdim=True)
    return torch.where((length > 0) & torch.isfinite(length), matrix, fresh)


def _length(column: torch.Tensor) -> torch.Tensor:
    return column.square().sum(dim=1, keepdim=True).sqrt()
