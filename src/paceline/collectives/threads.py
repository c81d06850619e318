"""N ranks as threads of one process, for tests and demos."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from paceline.collectives.protocols import (
    CollectiveCall,
    Op,
    Traits,
    Work,
    check_all_to_all,
    check_gather,
    check_reducible,
    check_root,
    mismatch,
)
from paceline.collectives.tree_sum import tree_sum
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
            raise UsageError(f"a world needs at least one rank, got size={size}")
        self.size = size
        self._changed = threading.Condition()
        self._rounds: dict[_Place, _Round] = {}
        self._gone: dict[int, str] = {}
        self._waits: dict[int, str] = {}
        self._transports = [ThreadTransport(self, rank, size) for rank in range(size)]

    def transport(self, rank: int) -> "ThreadTransport":
        """The transport of one rank. Every call gives the same one."""
        check_root(rank, self.size)
        return self._transports[rank]

    def leave(self, rank: int, why: str) -> None:
        """Declare that a rank issues no more collectives. Those that need it then raise PeerLost with `why`."""
        with self._changed:
            self._gone.setdefault(rank, why)
            self._changed.notify_all()

    def _join(
        self, place: "_Place", rank: int, call: str, source: torch.Tensor, target: torch.Tensor, combine: "_Combine"
    ) -> "_Round":
        """Deposit a contribution. The last rank to arrive combines all of them.

        Why no rank reads a tensor that its owner may have changed
        ---------------------------------------------------------
        A contribution is the caller's own tensor, not a copy. Its owner may touch it again only after its `wait` has
        returned True, and that happens only after the last rank to arrive has both read every contribution and written
        every result, in this one place and under the lock. Results are made before the first is written, since ranks
        may pass the same tensor or views of one another.
        """
        with self._changed:
            joined = self._rounds.setdefault(place, _Round())
            joined.calls[rank] = call
            joined.tensors[rank] = source, target
            if len(joined.calls) == self.size:
                del self._rounds[place]
                joined.complete(combine)
                self._changed.notify_all()
            return joined


_Place = tuple[tuple[int, ...], int]  # which sequence of collectives, and the number in it
_Combine = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]  # what each rank gets, from what each has brought


class _Round:
    """One collective of the whole world."""

    def __init__(self) -> None:
        self.calls: dict[int, str] = {}
        self.tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.over = False
        self.mismatch: str | None = None
        self.failure: RuntimeError | None = None

    def complete(self, combine: _Combine) -> None:
        calls = [(rank, self.calls[rank]) for rank in sorted(self.calls)]
        pairs = [self.tensors[rank] for rank, _ in calls]
        if len({call for _, call in calls}) > 1:
            self.mismatch = mismatch({f"rank {rank}": call for rank, call in calls})
        else:
            try:
                with torch.no_grad():
                    results = combine([source for source, _ in pairs])
                    for (_, target), result in zip(pairs, results, strict=True):
                        target.copy_(result)
            except RuntimeError as error:
                self.failure = error
        self.tensors.clear()
        self.over = True


class ThreadTransport:
    """The transport of one rank of a `ThreadWorld`."""

    def __init__(self, world: ThreadWorld, rank: int, size: int, sequence: tuple[int, ...] = ()) -> None:
        self.rank = rank
        self.size = size
        self.watch = _ThreadWatch(world, rank)
        self._world = world
        self._sequence = sequence  # duplicates count their collectives separately
        self._duplicates = 0
        self._started = 0
        self._traits = Traits(single=size == 1, tree_sum=True, all_to_all=True)

    def traits(self, device: torch.device) -> Traits:
        return self._traits

    def progress(self) -> None:
        """The last rank to join a collective completes it for all."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def all_reduce(self, flat: torch.Tensor, op: Op = Op.SUM) -> Work:
        check_reducible(flat, op)
        call = CollectiveCall.of("all_reduce", flat, op.value)
        return self._start(call, flat, flat, lambda parts: [_reduce(parts, op)] * self.size)

    def broadcast(self, flat: torch.Tensor, root: int = 0) -> Work:
        check_root(root, self.size)
        call = CollectiveCall.of("broadcast", flat, f"root={root}")
        return self._start(call, flat, flat, lambda parts: [parts[root]] * self.size)

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> Work:
        check_gather(out, part, self.size)
        call = CollectiveCall.of("all_gather", part, "")
        return self._start(call, part.reshape(-1), out.view(-1), lambda parts: [torch.cat(parts)] * self.size)

    def all_to_all(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        check_all_to_all(out, flat, self.size)
        call = CollectiveCall.of("all_to_all", flat, "")
        rows = flat.reshape(self.size, flat.numel() // self.size)  # row q goes to rank q
        return self._start(call, rows, out.view_as(rows), lambda parts: torch.stack(parts, dim=1).unbind())

    def dup(self, timeout_s: float | None = None) -> "ThreadTransport":
        self._duplicates += 1
        return ThreadTransport(self._world, self.rank, self.size, sequence=(*self._sequence, self._duplicates))

    def close(self) -> None:
        """Remove the rank from the world, unless it has other transports there."""
        if not self._sequence:
            self._world.leave(self.rank, "closed its transport")

    def _start(self, call: CollectiveCall, source: torch.Tensor, target: torch.Tensor, combine: _Combine) -> Work:
        place, text = (self._sequence, self._started), str(call)
        self._started += 1
        joined = self._world._join(place, self.rank, text, source, target, combine)
        return _ThreadWork(self._world, self.watch, self.rank, text, joined)


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
        joined, changed = self._round, self._world._changed
        with changed:
            self._watch.pending = joined
            if not changed.wait_for(self._is_decided, seconds):
                return False
        if joined.mismatch is not None:
            raise CollectiveMismatch(joined.mismatch, ranks=sorted(joined.calls))
        if joined.failure is not None:
            raise CollectiveError(f"{self._call} failed on every rank: {joined.failure}") from joined.failure
        return True

    def _is_decided(self) -> bool:
        """Whether it is complete. Raises if it never will be."""
        for rank, why in self._world._gone.items():
            if not self._round.over and rank not in self._round.calls:
                raise PeerLost(
                    f"rank {rank} {why}, and rank {self._rank} needs it in {self._call}; see that rank's error",
                    ranks=[rank],
                )
        return self._round.over


class _ThreadWatch:
    """Threads share memory, so missing ranks are known directly."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._reports = Reports()
        self.pending: _Round | None = None

    def look(self, what: str, waited_s: float) -> None:
        waits = self._world._waits
        waits[self._rank] = what
        if self._reports.due(waited_s):
            doing = {peer: f"waits in {other}" for peer, other in list(waits.items())}
            absent = [f"rank {peer}, which {doing.get(peer, 'is in no collective')}" for peer in self.absent()]
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
