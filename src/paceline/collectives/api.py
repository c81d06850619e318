"""How bytes move: the protocols that every transport answers to.

A transport starts a collective and hands back a `Work`. Nothing in a transport waits without an end: whoever needs the
result waits in slices through `collectives.wait.finish`, which looks at the `Watch` between slices. So Ctrl-C ends a
wait at once, and a dead or absent peer is named.
"""

from enum import Enum
from typing import Protocol

import torch

from paceline.errors import UsageError


class Op(Enum):
    """How the tensors of all ranks are combined."""

    SUM = "sum"
    MEAN = "mean"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    TREE = "tree"
    """The sum, added in the tree over rank numbers (`collectives.tree`) and rounded at each of its nodes."""


class Work(Protocol):
    """One collective in flight."""

    def done(self) -> bool:
        """Whether it has completed (well or not). Never blocks."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`. True once complete; raises what the transport raised.

        Only then may the caller read the result, or touch any tensor that was handed to the collective.
        """
        ...


class Watch(Protocol):
    """Who is alive, and who waits for whom."""

    def look(self, what: str, waited_s: float) -> None:
        """Called between the slices of a wait for `what`: reports absent peers, raises for dead ones."""
        ...

    def explain(self, what: str, waited_s: float, error: Exception) -> Exception:
        """The typed error that says why `what` failed with `error`: which rank is gone, as far as can be known."""
        ...

    def left(self) -> None:
        """Called when a wait that was looked at has ended, however it ended."""
        ...

    def absent(self) -> list[int]:
        """The ranks that are not known to wait for the same thing as this one."""
        ...


class Transport(Protocol):
    """How one rank exchanges bytes with the others of its group."""

    @property
    def rank(self) -> int:
        """This rank's number within the group."""
        ...

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        ...

    @property
    def watch(self) -> Watch: ...

    @property
    def alone(self) -> bool:
        """Whether no other rank takes part. A group written in Python may reach further than its size says."""
        ...

    @property
    def inline(self) -> bool:
        """Whether the calling thread itself does the work of a collective, inside `progress` and `wait`.

        If not, bytes move beside it, on threads or streams of their own.
        """
        ...

    def averages(self, device: torch.device) -> bool:
        """Whether `Op.MEAN` of tensors on `device` costs no more than `Op.SUM`: the division is part of the sum."""
        ...

    def trees(self, device: torch.device) -> bool:
        """Whether `all_reduce` of tensors on `device` can do `Op.TREE`. All ranks come to the same."""
        ...

    def queues(self, device: torch.device) -> bool:
        """Whether collectives of tensors on `device` are queued on a stream, so that to wait for one orders the
        current stream after it, and the host goes on."""
        ...

    def exchanges(self, device: torch.device) -> bool:
        """Whether tensors on `device` can be exchanged. Not every process group can."""
        ...

    def progress(self) -> None:
        """Do what this rank owes to the collectives in flight, as far as the others are ready. Never blocks."""
        ...

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeroed flat memory, of the kind this transport reduces best."""
        ...

    def all_reduce(self, flat: torch.Tensor, op: Op = Op.SUM) -> Work:
        """Combine `flat` over all ranks, in place. Sparse tensors are allowed where the transport can."""
        ...

    def broadcast(self, flat: torch.Tensor, root: int = 0) -> Work:
        """Overwrite `flat` with that of rank `root`."""
        ...

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> Work:
        """Fill `out` (size × part.numel(), same dtype) with the parts of all ranks, in rank order."""
        ...

    def exchange(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        """Cut `flat` into one equal part per rank and send part q to rank q: part q of `out` comes from rank q."""
        ...

    def apart(self, timeout_s: float | None = None) -> "Transport":
        """A transport over the same ranks whose collectives are not mixed up with those of this one. All ranks ask.

        Why every replica asks for one
        ------------------------------
        Transports pair the n-th collective of one rank with the n-th of another. The buckets of one replica are
        launched in one order on all ranks. But those of two replicas in one backward interleave as gradients become
        ready, and a parameter that only some ranks use makes its bucket ready at the end on the others: sums of
        different models, in silence.
        """
        ...

    def close(self) -> None:
        """Give back what the transport holds. Idempotent."""
        ...


def describe(kind: str, tensor: torch.Tensor, detail: str) -> str:
    """One collective in words that are equal on two ranks exactly when the collectives match."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    layout = "" if tensor.layout is torch.strided else "sparse "
    return f"{kind}({detail}) of {layout}{dtype}{list(tensor.shape)}"


def check_reducible(tensor: torch.Tensor, op: Op) -> None:
    """Refuse what no transport can reduce, with the same error on all of them."""
    kind = tensor.dtype
    if op is Op.MEAN and not (kind.is_floating_point or kind.is_complex):
        raise UsageError(f"mean needs a floating point or complex tensor, got {kind}; use sum, or convert the tensor")
    if kind.is_complex and op not in (Op.SUM, Op.MEAN, Op.TREE):
        raise UsageError(f"complex tensors can be reduced by sum, mean or tree, got {op.value} of {kind}")
    if tensor.layout is not torch.strided and op not in (Op.SUM, Op.MEAN):
        raise UsageError(f"sparse tensors can be reduced by sum or mean, got {op.value}")


def check_tree(op: Op, able: bool) -> None:
    """Refuse the tree where a transport has no such sum. `able` is what it says of itself in `trees`."""
    if op is Op.TREE and not able:
        raise UsageError(
            "all_reduce by tree was asked of a transport that cannot add in the tree over rank numbers; shared memory "
            "can, as can gloo and NCCL between at most 2 ranks; ask `trees(device)` first, or use sum"
        )


def check_root(root: int, size: int) -> None:
    if not 0 <= root < size:
        raise UsageError(f"root must be a rank of the group, 0 to {size - 1}, got {root}")


def check_gather(out: torch.Tensor, part: torch.Tensor, size: int) -> None:
    if out.dtype != part.dtype or out.numel() != size * part.numel():
        raise UsageError(
            f"all_gather over {size} ranks of {part.numel()} elements of {part.dtype} needs an `out` of "
            f"{size * part.numel()} elements of the same dtype, got {out.numel()} of {out.dtype}"
        )


def check_exchange(out: torch.Tensor, flat: torch.Tensor, size: int) -> None:
    if out.dtype != flat.dtype or out.numel() != flat.numel() or flat.numel() % size:
        raise UsageError(
            f"exchange over {size} ranks needs an `out` like `flat`, with a multiple of {size} elements, got "
            f"{out.numel()} of {out.dtype} for {flat.numel()} of {flat.dtype}"
        )
