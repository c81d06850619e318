"""The protocols that every transport implements.

A transport starts a collective and returns a `Work`. Nothing in a transport waits without a limit: callers wait for the
result in slices through `collectives.group.finish`, which consults the `Watch` between slices. So Ctrl-C ends a
wait at once, and a dead or absent peer is named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import torch

from paceline.errors import UsageError
from paceline.placement import Span

SAME_ORDER = "Every rank must issue the same collectives in the same order"


class Op(Enum):
    """How the tensors of all ranks are combined."""

    SUM = "sum"
    MEAN = "mean"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    TREE = "tree"
    """The sum, added in the tree over rank numbers (`collectives.tree_sum`) and rounded at each of its nodes."""


class Work(Protocol):
    """One collective in flight."""

    def done(self) -> bool:
        """Whether it has completed, with or without an error. Never blocks. May start the next collective of a work of
        several."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`. True once complete; raises what the transport raised.

        Only then may the caller read the result, or touch any tensor that was handed to the collective.
        """
        ...


class Watch(Protocol):
    """Which ranks are alive, and which wait for which."""

    def look(self, what: str, waited_s: float) -> None:
        """Called between the slices of a wait for `what`: reports absent peers, raises for dead ones."""
        ...

    def explain(self, what: str, waited_s: float, error: Exception) -> Exception:
        """The typed error that says why `what` failed with `error`: which rank has died, as far as that is known."""
        ...

    def left(self) -> None:
        """Called when a wait that was passed to `look` has ended, with or without an error."""
        ...

    def absent(self) -> list[int]:
        """The ranks that are not known to wait for the same thing as this one."""
        ...


@dataclass(frozen=True, slots=True)
class Traits:
    """The capabilities of a transport for tensors on one kind of device."""

    single: bool = False
    """No other rank takes part. A group written in Python may reach further than its size says."""
    progress_on_caller: bool = False
    """The calling thread does the work of a collective, inside `progress` and `wait`. If not, bytes move beside it, on
    threads or streams of their own."""
    native_mean: bool = False
    """`Op.MEAN` costs no more than `Op.SUM`: the division is part of the sum."""
    tree_sum: bool = False
    """`all_reduce` can do `Op.TREE`."""
    stream_ordered: bool = False
    """Collectives are queued on a stream, so that waiting for one orders the current stream after it and does not
    block the host."""
    all_to_all: bool = False
    """`all_to_all` works. Not every process group can do it."""
    reduce_scatter: bool = False
    """It is a `ScatteringTransport` for these tensors."""
    sharded: bool = False
    """It is a `ShardedTransport` for these tensors."""


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

    def traits(self, device: torch.device) -> Traits:
        """The traits of collectives of tensors on `device`. Equal on all ranks, and cheap to query."""
        ...

    def progress(self) -> None:
        """Do this rank's part of the collectives in flight, as far as the others are ready. Never blocks."""
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

    def all_to_all(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        """Cut `flat` into one equal part per rank and send part q to rank q: part q of `out` comes from rank q."""
        ...

    def dup(self, timeout_s: float | None = None) -> "Transport":
        """A transport over the same ranks, whose collectives cannot meet those of this one. All ranks must call it.

        Why every replica has one
        ------------------------------
        Transports pair the n-th collective of one rank with the n-th of another. The buckets of one replica are
        launched in one order on all ranks. But those of two replicas in one backward interleave as gradients become
        ready, and a parameter that only some ranks use makes its bucket ready at the end on the others: sums of
        different models, in silence.
        """
        ...

    def close(self) -> None:
        """Release what the transport holds. Idempotent."""
        ...


class ShardedTransport(Transport, Protocol):
    """A transport that reduces into shards, and gathers them, in place."""

    def reduce_scatter(self, flat: torch.Tensor, spans: Sequence[Sequence[Span]], op: Op = Op.SUM) -> Work:
        """Combine `flat` over all ranks, in place: this rank gets the spans `spans[rank]` of the result, and the
        rest of `flat` is undefined afterwards. Fewer spans than ranks: rank `len(spans)` starts over with the first, so
        that ranks that far apart get the same."""
        ...

    def gather_blocks(
        self, own: Sequence[torch.Tensor], blocks: Sequence[Sequence[torch.Tensor]], tag: int
    ) -> "Gather":
        """Send the flat blocks `own`, and receive those of rank r in `blocks[r]`."""
        ...


class ScatteringTransport(Transport, Protocol):
    """A transport whose backend reduces and scatters by itself."""

    def reduce_scatter_tensor(self, out: torch.Tensor, flat: torch.Tensor, op: Op = Op.SUM) -> Work:
        """Cut `flat` into one equal part per rank and have this rank's part, combined over all ranks, in `out`."""
        ...


class Gather(Work, Protocol):
    """A gather of blocks in flight."""

    tags: Sequence[float]
    """The tags of all ranks, once complete: what each of them is gathering."""


class CollectiveCall(NamedTuple):
    """A rank's call. The text is equal on two ranks exactly if the collectives match; it is created on demand."""

    kind: str
    dtype: torch.dtype
    layout: torch.layout
    shape: Sequence[int]
    detail: str

    @classmethod
    def of(cls, kind: str, tensor: torch.Tensor, detail: str) -> "CollectiveCall":
        return cls(kind, tensor.dtype, tensor.layout, tensor.shape, detail)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        layout = "" if self.layout is torch.strided else "sparse "
        return f"{self.kind}({self.detail}) of {layout}{dtype}{list(self.shape)}"


def mismatch(called: Mapping[str, object]) -> str:
    """The text of a CollectiveMismatch, from what each rank or host has called."""
    return f"{'; '.join(f'{who} called {call}' for who, call in called.items())}. {SAME_ORDER}"


def is_reducible(dtype: torch.dtype, op: Op) -> bool:
    """Whether dense tensors of this type can be combined so."""
    if dtype.is_complex:
        return op in (Op.SUM, Op.MEAN, Op.TREE)
    return dtype.is_floating_point or op is not Op.MEAN


def check_reducible(tensor: torch.Tensor, op: Op) -> None:
    """Refuse what no transport can reduce, with the same error for all transports."""
    kind = tensor.dtype
    if not is_reducible(kind, op):
        if op is Op.MEAN:
            raise UsageError(
                f"mean needs a floating point or complex tensor, got {kind}; use sum, or convert the tensor"
            )
        raise UsageError(f"complex tensors can be reduced by sum, mean or tree, got {op.value} of {kind}")
    if tensor.layout is not torch.strided and op not in (Op.SUM, Op.MEAN):
        raise UsageError(f"sparse tensors can be reduced by sum or mean, got {op.value}")


def check_tree(op: Op, able: bool) -> None:
    """Refuse the tree where a transport has no such sum. `able`: its `Traits.tree_sum`."""
    if op is Op.TREE and not able:
        raise UsageError(
            "this transport cannot add in the tree over rank numbers, as op='tree' requires; shared memory can, as can "
            "gloo and NCCL between at most 2 ranks; check `traits(device).tree_sum` first, or use sum"
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


def check_all_to_all(out: torch.Tensor, flat: torch.Tensor, size: int) -> None:
    if out.dtype != flat.dtype or out.numel() != flat.numel() or flat.numel() % size:
        raise UsageError(
            f"all_to_all over {size} ranks needs an `out` like `flat`, with a multiple of {size} elements, got "
            f"{out.numel()} of {out.dtype} for {flat.numel()} of {flat.dtype}"
        )
