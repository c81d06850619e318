"""Shared memory as a transport: for the CPU tensors of ranks on one host."""

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from paceline.collectives.protocols import (
    Op,
    Traits,
    Transport,
    Watch,
    Work,
    check_all_to_all,
    check_gather,
    check_reducible,
    check_root,
    is_reducible,
)
from paceline.collectives.shm import codes
from paceline.collectives.shm.arenas import ArenaPool, Arenas
from paceline.collectives.shm.codes import CodedCall
from paceline.collectives.shm.crossing import Channel
from paceline.collectives.shm.engine import Engine, Operation
from paceline.collectives.shm.mesh import Mesh
from paceline.collectives.shm.prepare import Sources, owned_slice
from paceline.collectives.shm.summing import Summing, new_scratch
from paceline.collectives.watch import StoreWatch
from paceline.errors import CollectiveError
from paceline.placement import Span

_CPU = torch.device("cpu")
_ON_HOST = Traits(progress_on_caller=True, native_mean=True, tree_sum=True, all_to_all=True, sharded=True)
_ALL_REDUCE = {
    (dtype, op): codes.ALL_REDUCE | codes.OPS[op] | codes.DTYPES[dtype]
    for dtype in codes.DTYPES
    for op in Op
    if is_reducible(dtype, op)
}


class ShmTransport:
    """Collectives over memory that all ranks of a host map. The calling thread does the work, in `progress` and `wait`.

    Tensors in memory from `allocate` are combined in place; others pass through memory of the transport's own. All but
    dense CPU tensors go through `fallback`, whose collectives are counted separately.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        watch: StoreWatch,
        fallback: Transport,
        again: Callable[[float | None], Transport] | None = None,
        channel: Channel | None = None,
        owners: int | None = None,
        divide_by: int | None = None,
    ) -> None:
        """`again` creates another transport over the same ranks. For the others see `collectives.two_level`."""
        self.rank = mesh.place
        self.size = mesh.size
        self._mesh = mesh
        self._calls = watch.calls
        self._fallback = fallback
        self._again = again
        self._arenas = Arenas()
        self._pool = ArenaPool(self._arenas)
        self._scratch = new_scratch()
        self._engine = Engine(mesh, self._arenas, channel, owners or mesh.size, divide_by or mesh.size)
        self.watch: Watch = _PoisoningWatch(watch, self._engine)
        # On the engine, which lives as long as any handle of a collective.
        weakref.finalize(self._engine, mesh.close)

    def traits(self, device: torch.device) -> Traits:
        if device.type == "cpu":
            return _ON_HOST
        return replace(self._fallback.traits(device), single=False, progress_on_caller=True)

    def progress(self) -> None:
        self._engine.progress()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu" or numel == 0:
            return torch.zeros(numel, dtype=dtype, device=device)
        return self._arenas.allocate(numel * dtype.itemsize, f"{numel:,} elements of {dtype}").view(dtype)

    def all_reduce(self, flat: torch.Tensor, op: Op = Op.SUM) -> Work:
        code = _ALL_REDUCE.get((flat.dtype, op))
        if code is None or flat.device != _CPU or flat.layout is not torch.strided:
            check_reducible(flat, op)
            return self._fallback.all_reduce(flat, op)
        return self._offer(code, flat)

    def broadcast(self, flat: torch.Tensor, root: int = 0) -> Work:
        check_root(root, self.size)
        if not _ours(flat):
            return self._fallback.broadcast(flat, root)
        code = codes.BROADCAST | codes.DTYPES[flat.dtype] | root << codes.ROOT
        home = flat.detach()
        if root == self.rank:
            return self._offer(code, home, lambda _: None)  # the root has it already

        def read(sources: Sources) -> None:
            home.copy_(sources[0].view(home.shape))

        return self._start(Operation(CodedCall(code, flat.numel()), None, 0, home, read=read, early=True))

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> Work:
        if out.dtype != part.dtype or out.numel() != self.size * part.numel():
            check_gather(out, part, self.size)
        if not _ours(part):
            return self._fallback.all_gather(out, part)
        own = out.data_ptr() + self.rank * part.numel() * part.itemsize
        move = part.data_ptr() != own and _overlap(part, out)
        return self._offer(codes.ALL_GATHER | codes.DTYPES[part.dtype], part, _reader(out.detach()), move=move)

    def all_to_all(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        check_all_to_all(out, flat, self.size)
        if not _ours(flat):
            return self._fallback.all_to_all(out, flat)
        code = codes.ALL_TO_ALL | codes.DTYPES[flat.dtype]
        return self._offer(code, flat, _reader(out.detach()), move=_overlap(flat, out))

    def reduce_scatter(self, flat: torch.Tensor, spans: Sequence[Sequence[Span]], op: Op = Op.SUM) -> Work:
        if not self.holds(flat):
            return self.all_reduce(flat, op)

        twins = [self.rank, *(r for r in range(self.rank % len(spans), self.size, len(spans)) if r != self.rank)]

        def read(copies: Sources) -> None:
            for begin, end in spans[self.rank % len(spans)]:
                low, high = owned_slice(end - begin, flat.itemsize, self.rank // len(spans), len(twins))  # of each twin
                Summing(copies, op, (begin + low, begin + high), self.size, self._scratch).scatter(twins)

        return self._offer(codes.REDUCE_SCATTER | codes.OPS[op] | codes.DTYPES[flat.dtype], flat, read)

    def gather_blocks(
        self, own: Sequence[torch.Tensor], blocks: Sequence[Sequence[torch.Tensor]], tag: int
    ) -> "_ShmWork":
        sizes = [[block.numel() for block in of_rank] for of_rank in blocks]
        width = max(map(sum, sizes)) + 1
        like = next(block for of_rank in blocks for block in of_rank)
        memory = self._pool.take(width * like.itemsize)
        staged = memory[: width * like.itemsize].view(like.dtype)
        if own:
            torch.cat(list(own), out=staged[: sum(sizes[self.rank])])
        staged[-1] = tag
        found = self._arenas.find(memory)
        assert found is not None
        tags: list[float] = []

        def read(sources: Sources) -> None:
            for rank, (theirs, source) in enumerate(zip(blocks, sources, strict=True)):
                tags.append(source[-1].item())
                if theirs and not (own and rank == self.rank and theirs[0].data_ptr() == own[0].data_ptr()):
                    torch._foreach_copy_(list(theirs), source[: sum(sizes[rank])].split(sizes[rank]))

        call = CodedCall(codes.ALL_GATHER | codes.DTYPES[like.dtype], width)
        operation = Operation(call, *found, blocks, read, lambda: self._pool.give(memory), early=True)
        return self._start(operation, tags)

    def dup(self, timeout_s: float | None = None) -> Transport:
        if self._again is None:
            raise CollectiveError("this shared-memory transport was made without a store, so it cannot be duplicated")
        return self._again(timeout_s)

    def close(self) -> None:
        """Release descriptors and the others' memory. Tensors from `allocate` remain valid."""
        self._engine.close()
        self._pool.clear()
        self._fallback.close()

    def holds(self, flat: torch.Tensor) -> bool:
        """Whether a tensor lies in memory that the ranks of this host share, and can be combined there."""
        return _ours(flat) and flat.is_contiguous() and self._arenas.find(flat) is not None

    def _offer(
        self, code: int, flat: torch.Tensor, read: Callable[[Sources], None] | None = None, *, move: bool = False
    ) -> Work:
        """Start a collective in which the others find `flat` in shared memory: to combine it in place, or, with `read`,
        to read it. It is copied there first if it lives elsewhere, or has to `move` since this rank writes there."""
        call = CodedCall(code, flat.numel())
        if not move and flat.is_contiguous() and not flat.is_conj() and not flat.is_neg():
            found = self._arenas.find(flat)
            if found is not None:
                return self._start(Operation(call, *found, flat, read))
        if not call.numel:
            return self._start(Operation(call, None, 0, flat, read))
        block = self._pool.take(flat.nbytes)
        home, staged = flat.detach(), block[: flat.nbytes].view(flat.dtype).view(flat.shape)
        staged.copy_(home)

        def give_back() -> None:
            self._pool.give(block)

        def put_back() -> None:
            home.copy_(staged)
            give_back()

        found = self._arenas.find(block)
        assert found is not None
        if read is None:
            return self._start(Operation(call, *found, home, None, put_back))
        return self._start(Operation(call, *found, None, read, give_back, early=True))

    def _start(self, operation: Operation, tags: Sequence[float] = ()) -> "_ShmWork":
        self._engine.start(operation)
        self._calls.began(operation.call)
        return _ShmWork(self._engine, operation, tags)


class _ShmWork:
    __slots__ = ("_engine", "_operation", "tags")

    def __init__(self, engine: Engine, operation: Operation, tags: Sequence[float] = ()) -> None:
        self._engine = engine
        self._operation = operation
        self.tags = tags  # of a gather of blocks

    def done(self) -> bool:
        return self._operation.over

    def wait(self, seconds: float) -> bool:
        return self._engine.wait(self._operation, seconds)

    def __del__(self) -> None:
        if not self._operation.over and not sys.is_finalizing():
            self._engine.poison(f"nobody waited for {self._operation}")


class _PoisoningWatch:
    """The watch of the group. A wait that ends with an error ends the use of the transport: see `Engine.poison`."""

    def __init__(self, watch: StoreWatch, engine: Engine) -> None:
        self._watch = watch
        self._engine = engine

    def look(self, what: str, waited_s: float) -> None:
        try:
            self._watch.look(what, waited_s)
        except BaseException as error:
            self._engine.poison(str(error) or type(error).__name__)
            raise

    def explain(self, what: str, waited_s: float, error: Exception) -> Exception:
        return self._watch.explain(what, waited_s, error)

    def left(self) -> None:
        self._watch.left()

    def absent(self) -> list[int]:
        """Called before PeerAbsent is raised."""
        ranks = self._watch.absent()
        names = ", ".join(f"rank {rank}" for rank in ranks) or "another rank"
        self._engine.poison(f"it waited for {names} longer than its timeout", tuple(ranks))
        return ranks


def _ours(tensor: torch.Tensor) -> bool:
    return tensor.device == _CPU and tensor.layout is torch.strided and tensor.dtype in codes.DTYPES


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_contiguous() or not other.is_contiguous():
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    begins, starts = one.data_ptr(), other.data_ptr()
    return begins < starts + other.nbytes and starts < begins + one.nbytes


def _reader(target: torch.Tensor) -> Callable[[Sources], None]:
    """Fills `target` with the data of all ranks, in rank order."""

    def read(sources: Sources) -> None:
        flat = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        if flat.numel():
            for part, source in zip(flat.view(len(sources), -1), sources, strict=True):
                if part.data_ptr() != source.data_ptr():
                    part.copy_(source)
        if flat is not target:
            target.copy_(flat)

    return read
