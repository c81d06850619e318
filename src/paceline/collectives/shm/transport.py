"""Shared memory as a transport: for the CPU tensors of ranks on one host."""

import sys
import weakref
from collections.abc import Callable

import torch
from torch.distributed.distributed_c10d import Store

from paceline.collectives.api import (
    Op,
    Transport,
    Watch,
    Work,
    check_exchange,
    check_gather,
    check_reducible,
    check_root,
)
from paceline.collectives.shm import record
from paceline.collectives.shm.arenas import NOWHERE, Arenas, Staging
from paceline.collectives.shm.crossing import Between
from paceline.collectives.shm.engine import Engine
from paceline.collectives.shm.meet import meet
from paceline.collectives.shm.mesh import Mesh
from paceline.collectives.shm.operation import Operation
from paceline.collectives.shm.plan import Sources
from paceline.collectives.shm.presence import Refusal
from paceline.collectives.watch import StoreWatch
from paceline.errors import CollectiveError

_CPU = torch.device("cpu")


class ShmTransport:
    """Collectives over memory that all ranks of a host map. The calling thread does the work, in `progress` and `wait`.

    Tensors that live in what `allocate` gave are combined where they are; others pass through memory of the
    transport's own. What is not a dense CPU tensor goes through `fallback`, whose collectives are counted apart.
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        watch: StoreWatch,
        fallback: Transport,
        store: Store | None = None,
        between: Between | None = None,
        owners: int | None = None,
        divide_by: int | None = None,
    ) -> None:
        self._mesh = mesh
        self._store_watch = watch
        self._fallback = fallback
        self._fallback_is_inline = fallback.inline
        self._store = store
        self._arenas = Arenas()
        self._staging = Staging(self._arenas)
        self._engine = Engine(mesh, self._arenas, between, owners or mesh.size, divide_by or mesh.size)
        self._watch = _GivingUp(watch, self._engine)
        # On the engine, which lives as long as a handle of a collective does.
        weakref.finalize(self._engine, mesh.close)

    @property
    def rank(self) -> int:
        return self._mesh.place

    @property
    def size(self) -> int:
        return self._mesh.size

    @property
    def watch(self) -> Watch:
        return self._watch

    @property
    def alone(self) -> bool:
        return False

    @property
    def inline(self) -> bool:
        return True

    def averages(self, device: torch.device) -> bool:
        return device.type == "cpu" or self._fallback.averages(device)

    def trees(self, device: torch.device) -> bool:
        return device.type == "cpu" or self._fallback.trees(device)

    def queues(self, device: torch.device) -> bool:
        return device.type != "cpu" and self._fallback.queues(device)

    def exchanges(self, device: torch.device) -> bool:
        return device.type == "cpu" or self._fallback.exchanges(device)

    def progress(self) -> None:
        self._engine.progress()
        if self._fallback_is_inline:
            self._fallback.progress()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if device.type != "cpu" or numel == 0:
            return torch.zeros(numel, dtype=dtype, device=device)
        return self._arenas.allocate(numel * dtype.itemsize, f"{numel:,} elements of {dtype}").view(dtype)

    def all_reduce(self, flat: torch.Tensor, op: Op = Op.SUM) -> Work:
        check_reducible(flat, op)
        if not _ours(flat):
            return self._fallback.all_reduce(flat, op)
        place, block = self._locate(flat)
        word = record.call_word(record.ALL_REDUCE, flat.dtype, op=op)
        if block is None:
            return self._start(Operation(word, flat.numel(), place, keep=flat))
        home = flat.detach()
        staged = _view_like(block, home)
        staged.copy_(home)

        def bring_back() -> None:
            home.copy_(staged)
            self._staging.give(block)

        return self._start(Operation(word, flat.numel(), place, keep=block, after=bring_back))

    def broadcast(self, flat: torch.Tensor, root: int = 0) -> Work:
        check_root(root, self.size)
        if not _ours(flat):
            return self._fallback.broadcast(flat, root)
        word = record.call_word(record.BROADCAST, flat.dtype, root=root)
        home = flat.detach()
        if root == self.rank:
            return self._offer(word, home, _read_nothing)

        def read(sources: Sources) -> None:
            home.copy_(sources[0].view(home.shape))

        return self._start(Operation(word, flat.numel(), (NOWHERE, 0), keep=home, read=read, early=True))

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> Work:
        check_gather(out, part, self.size)
        if not _ours(part):
            return self._fallback.all_gather(out, part)
        target = out.detach()
        word = record.call_word(record.ALL_GATHER, part.dtype)
        own = target.data_ptr() + self.rank * part.numel() * part.itemsize
        in_place = part.data_ptr() == own
        return self._offer(word, part.detach(), _reader(target), apart_from=None if in_place else target)

    def exchange(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        check_exchange(out, flat, self.size)
        if not _ours(flat):
            return self._fallback.exchange(out, flat)
        target = out.detach()
        word = record.call_word(record.EXCHANGE, flat.dtype)
        return self._offer(word, flat.detach(), _reader(target), apart_from=target)

    def apart(self, timeout_s: float | None = None) -> "ShmTransport":
        if self._store is None:
            raise CollectiveError("a transport that was made without a store cannot meet the other ranks again")
        fallback = self._fallback.apart(timeout_s)
        met = meet(self._store, self.rank, self.size, watch=self._store_watch, timeout_s=timeout_s)
        if isinstance(met, Refusal):
            raise CollectiveError(f"the ranks share memory already, but not a second time: {met.reason}")
        watch = fallback.watch if isinstance(fallback.watch, StoreWatch) else self._store_watch
        return ShmTransport(met, watch=watch, fallback=fallback, store=self._store)

    def close(self) -> None:
        """Give back descriptors and the others' memory. Tensors from `allocate` stay as they are."""
        self._engine.close()
        self._staging.clear()
        self._fallback.close()

    def holds(self, flat: torch.Tensor) -> bool:
        """Whether a tensor lies in memory that the ranks of this host share, and can be combined there."""
        return _ours(flat) and flat.is_contiguous() and self._arenas.find(flat) is not None

    def _locate(self, flat: torch.Tensor, *, move: bool = False) -> tuple[tuple[int, int], torch.Tensor | None]:
        """Where the others will find a tensor, and the memory it was given for that if it has to move there."""
        if not move and flat.is_contiguous() and not flat.is_conj() and not flat.is_neg():
            found = self._arenas.find(flat)
            if found is not None:
                return (found[0].number, found[1]), None
        if not flat.numel():
            return (NOWHERE, 0), None
        block = self._staging.take(flat.numel() * flat.itemsize)
        found = self._arenas.find(block)
        assert found is not None
        return (found[0].number, 0), block

    def _offer(
        self,
        word: int,
        source: torch.Tensor,
        read: Callable[[Sources], None],
        *,
        apart_from: torch.Tensor | None = None,
    ) -> Work:
        """Let the others read `source`. It is copied first if it lives elsewhere, or where this rank writes."""
        place, block = self._locate(source, move=apart_from is not None and _overlap(source, apart_from))
        after = None
        if block is not None:
            _view_like(block, source).copy_(source)

            def after() -> None:
                self._staging.give(block)

        early = block is not None
        return self._start(Operation(word, source.numel(), place, keep=source, read=read, after=after, early=early))

    def _start(self, operation: Operation) -> Work:
        self._engine.start(operation)
        self._store_watch.calls.began(str(operation))
        return _ShmWork(self._engine, operation)


class _ShmWork:
    __slots__ = ("_engine", "_operation")

    def __init__(self, engine: Engine, operation: Operation) -> None:
        self._engine = engine
        self._operation = operation

    def done(self) -> bool:
        return self._operation.over

    def wait(self, seconds: float) -> bool:
        return self._engine.wait(self._operation, seconds)

    def __del__(self) -> None:
        if not self._operation.over and not sys.is_finalizing():
            self._engine.give_up(f"nobody waited for {self._operation}")


class _GivingUp:
    """The watch of the group. What ends a wait with an error ends the use of the transport: see `Engine.give_up`."""

    def __init__(self, watch: StoreWatch, engine: Engine) -> None:
        self._watch = watch
        self._engine = engine

    def look(self, what: str, waited_s: float) -> None:
        try:
            self._watch.look(what, waited_s)
        except BaseException as error:
            self._engine.give_up(str(error) or type(error).__name__)
            raise

    def explain(self, what: str, waited_s: float, error: Exception) -> Exception:
        return self._watch.explain(what, waited_s, error)

    def left(self) -> None:
        self._watch.left()

    def absent(self) -> list[int]:
        """Asked by who is about to raise PeerAbsent."""
        ranks = self._watch.absent()
        names = ", ".join(f"rank {rank}" for rank in ranks) or "another rank"
        self._engine.give_up(f"it waited for {names} longer than its timeout", tuple(ranks))
        return ranks


def _ours(tensor: torch.Tensor) -> bool:
    return tensor.device == _CPU and tensor.layout is torch.strided and record.knows(tensor.dtype)


def _view_like(block: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return block[: tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_contiguous() or not other.is_contiguous():
        return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    begins, starts = one.data_ptr(), other.data_ptr()
    return begins < starts + other.nbytes and starts < begins + one.nbytes


def _reader(target: torch.Tensor) -> Callable[[Sources], None]:
    """Fills `target` with what all ranks offer, in rank order."""

    def read(sources: Sources) -> None:
        flat = target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
        if flat.numel():
            for part, source in zip(flat.view(len(sources), -1), sources, strict=True):
                if part.data_ptr() != source.data_ptr():
                    part.copy_(source)
        if flat is not target:
            target.copy_(flat)

    return read


def _read_nothing(sources: Sources) -> None:
    """The root of a broadcast has it all."""
