"""N ranks as threads of one process, for tests and demos."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from paceline.collectives.api import (
    Op,
    Watch,
    Work,
    check_exchange,
    check_gather,
    check_reducible,
    check_root,
    describe,
)
from paceline.collectives.tree import tree_sum
from paceline.collectives.watch import Reports
from paceline.errors import CollectiveError, CollectiveMismatch, PeerLost, UsageError

T = TypeVar("T")
logger = logging.getLogger("paceline")


class ThreadWorld:
    """A world of `size` ranks that live in one process, each on a thread of its own.

    The n-th collective of a rank belongs with the n-th of every other. Reductions add in rank order, so their bits do
    not depend on which thread came first. Collectives that do not match raise CollectiveMismatch on every rank.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise UsageError(f"a world has at least one rank, got size={size}")
        self._size = size
        self._changed = threading.Condition()
        self._rounds: dict[_Place, _Round] = {}
        self._gone: dict[int, str] = {}
        self._waits: dict[int, str] = {}
        self._transports = [ThreadTransport(self, rank, size) for rank in range(size)]

    @property
    def size(self) -> int:
        return self._size

    def transport(self, rank: int) -> "ThreadTransport":
        """The transport of one rank. Every call gives the same one."""
        check_root(rank, self._size)
        return self._transports[rank]

    def leave(self, rank: int, why: str) -> None:
        """Say that a rank issues no more collectives. Those that need it then raise PeerLost with `why`."""
        with self._changed:
            self._gone.setdefault(rank, why)
            self._changed.notify_all()

    def _join(
        self, number: "_Place", rank: int, call: str, tensors: Sequence[torch.Tensor], compute: "_Compute"
    ) -> "_Round":
        """Deposit a contribution. The last rank to come combines all of them.

        Why nobody reads a tensor that its owner may have changed
        ---------------------------------------------------------
        A contribution is the caller's own tensor, not a copy. Its owner may touch it again only after its `wait` has
        returned True, and that happens only after the last rank to come has both read every contribution and written
        every result, in this one place and under the lock. The result is made in fresh memory first, since ranks may
        well hand in the same tensor or views of one another.
        """
        with self._changed:
            joined = self._rounds.setdefault(number, _Round())
            joined.calls[rank] = call
            joined.tensors[rank] = tensors
            if len(joined.calls) == self._size:
                del self._rounds[number]
                self._complete(joined, compute)
                self._changed.notify_all()
            return joined

    def _complete(self, joined: "_Round", compute: "_Compute") -> None:
        calls = joined.calls
        if len(set(calls.values())) > 1:
            told = "; ".join(f"rank {rank} called {calls[rank]}" for rank in sorted(calls))
            joined.mismatch = f"{told}. Every rank must issue the same collectives in the same order"
        else:
            try:
                with torch.no_grad():
                    compute([joined.tensors[rank] for rank in range(self._size)])
            except RuntimeError as error:
                joined.failure = error
        joined.tensors.clear()
        joined.over = True


_Place = tuple[tuple[int, ...], int]  # which line of collectives, and the number in it
_Compute = Callable[[list[Sequence[torch.Tensor]]], None]


class _Round:
    """One collective of the whole world."""

    def __init__(self) -> None:
        self.calls: dict[int, str] = {}
        self.tensors: dict[int, Sequence[torch.Tensor]] = {}
        self.over = False
        self.mismatch: str | None = None
        self.failure: RuntimeError | None = None


class ThreadTransport:
    """The transport of one rank of a `ThreadWorld`."""

    def __init__(self, world: ThreadWorld, rank: int, size: int, line: tuple[int, ...] = ()) -> None:
        self._world = world
        self._rank = rank
        self._size = size
        self._line = line  # transports that are apart count their collectives apart
        self._parts = 0
        self._started = 0
        self._watch = _ThreadWatch(world, rank)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def watch(self) -> Watch:
        return self._watch

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def inline(self) -> bool:
        return False

    def averages(self, device: torch.device) -> bool:
        return False

    def trees(self, device: torch.device) -> bool:
        return True

    def queues(self, device: torch.device) -> bool:
        return False

    def exchanges(self, device: torch.device) -> bool:
        return True

    def progress(self) -> None:
        """The last rank to join a collective completes it for all."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, flat: torch.Tensor, op: Op = Op.SUM) -> Work:
        check_reducible(flat, op)

        def compute(all_tensors: list[Sequence[torch.Tensor]]) -> None:
            parts = [tensors[0] for tensors in all_tensors]
            result = _reduce(parts, op)
            for tensors in all_tensors:
                tensors[0].copy_(result)

        return self._start(describe("all_reduce", flat, op.value), [flat], compute)

    def broadcast(self, flat: torch.Tensor, root: int = 0) -> Work:
        check_root(root, self._size)

        def compute(all_tensors: list[Sequence[torch.Tensor]]) -> None:
            for rank, tensors in enumerate(all_tensors):
                if rank != root:
                    tensors[0].copy_(all_tensors[root][0])

        return self._start(describe("broadcast", flat, f"root={root}"), [flat], compute)

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> Work:
        check_gather(out, part, self._size)

        def compute(all_tensors: list[Sequence[torch.Tensor]]) -> None:
            result = torch.cat([tensors[1].reshape(-1) for tensors in all_tensors])
            for tensors in all_tensors:
                tensors[0].view(-1).copy_(result)

        return self._start(describe("all_gather", part, ""), [out, part], compute)

    def exchange(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        check_exchange(out, flat, self._size)

        def compute(all_tensors: list[Sequence[torch.Tensor]]) -> None:
            parts = torch.stack([tensors[1].reshape(self._size, -1) for tensors in all_tensors], dim=1)
            for tensors, part in zip(all_tensors, parts, strict=True):
                tensors[0].view(-1).copy_(part.reshape(-1))

        return self._start(describe("exchange", flat, ""), [out, flat], compute)

    def apart(self, timeout_s: float | None = None) -> "ThreadTransport":
        self._parts += 1
        return ThreadTransport(self._world, self._rank, self._size, line=(*self._line, self._parts))

    def close(self) -> None:
        """Take the rank out of the world, unless this is one of several transports that it has there."""
        if not self._line:
            self._world.leave(self._rank, "closed its transport")

    def _start(self, call: str, tensors: Sequence[torch.Tensor], compute: _Compute) -> Work:
        number = (self._line, self._started)
        self._started += 1
        return _ThreadWork(
            self._world, self._watch, self._rank, call, self._world._join(number, self._rank, call, tensors, compute)
        )


class _ThreadWork:
    def __init__(self, world: ThreadWorld, watch: "_ThreadWatch", rank: int, call: str, joined: _Round) -> None:
        self._world = world
        self._watch = watch
        self._rank = rank
        self._call = call
        self._round = joined

    def done(self) -> bool:
        return self._round.over

    def wait(self, seconds: float) -> bool:
        joined, world = self._round, self._world
        deadline = time.monotonic() + seconds
        with world._changed:
            while not joined.over:
                self._watch.pending = joined
                for rank, why in world._gone.items():
                    if rank not in joined.calls:
                        raise PeerLost(
                            f"rank {rank} {why}, and rank {self._rank} needs it in {self._call}; see that rank's error",
                            ranks=[rank],
                        )
                if not world._changed.wait(max(0.0, deadline - time.monotonic())) and not joined.over:
                    return False
        if joined.mismatch is not None:
            raise CollectiveMismatch(joined.mismatch, ranks=sorted(joined.calls))
        if joined.failure is not None:
            raise CollectiveError(f"{self._call} failed on every rank: {joined.failure}") from joined.failure
        return True


class _ThreadWatch:
    """Threads share one memory, so who is missing is simply known."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._reports = Reports(3.0)
        self.pending: _Round | None = None

    def look(self, what: str, waited_s: float) -> None:
        waits = self._world._waits
        waits[self._rank] = what
        if self._reports.due(waited_s):
            absent = [f"rank {peer}, which waits in {waits.get(peer, 'nothing')}" for peer in self.absent()]
            logger.warning("rank %d has waited %.1f s in %s for %s", self._rank, waited_s, what, "; ".join(absent))

    def explain(self, what: str, waited_s: float, error: Exception) -> Exception:
        return CollectiveError(f"{what} failed on rank {self._rank} after {waited_s:.1f} s: {error}")

    def left(self) -> None:
        self._world._waits.pop(self._rank, None)
        self._reports.restart()
        self.pending = None

    def absent(self) -> list[int]:
        joined = self.pending
        return [peer for peer in range(self._world.size) if joined is not None and peer not in joined.calls]


def run(fn: Callable[[ThreadTransport], T], size: int) -> list[T]:
    """Run `fn(transport)` on `size` threads, one per rank, and return what each returned, in rank order.

    When a rank raises, ranks that wait for it get PeerLost, and the first error is raised here once all have ended.
    """
    world = ThreadWorld(size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = fn(world.transport(rank))
        except BaseException as error:  # noqa: BLE001 - raised again below, on the caller's thread
            errors.append(error)
            world.leave(rank, f"raised {type(error).__name__}: {error}")
        else:
            world.leave(rank, "returned")

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        for rank in range(size):
            world.leave(rank, "was interrupted")
        raise
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def _reduce(tensors: list[torch.Tensor], op: Op) -> torch.Tensor:
    """Combine in rank order, or in that of the tree, in fresh memory."""
    if op is Op.TREE:
        return tree_sum(tensors)
    result = tensors[0].coalesce().clone() if tensors[0].is_sparse else tensors[0].clone()
    for tensor in tensors[1:]:
        if op in (Op.SUM, Op.MEAN):
            result = result + tensor
        elif op is Op.PRODUCT:
            result = result * tensor
        else:
            result = torch.minimum(result, tensor) if op is Op.MIN else torch.maximum(result, tensor)
    if result.is_sparse:
        result = result.coalesce()
    return result.div_(len(tensors)) if op is Op.MEAN else result
