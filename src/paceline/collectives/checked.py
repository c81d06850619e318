"""The public collectives: they compare what every rank is about to do before any byte moves.

torch itself does not: calls in different order or of different shapes give wrong sums in silence, or end the process.
Here each rank posts one line about its call on the group's store and reads those of the others; if they differ, every
rank raises CollectiveMismatch and nothing was started, so the group stays usable. The check costs a few round trips to
the store. A group without a store (one that torch did not make) is used unchecked.
"""

import time
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from paceline.collectives.api import Op, Transport, Work, describe
from paceline.collectives.local import LocalTransport
from paceline.collectives.peers import StoreCall
from paceline.collectives.torch_dist import TorchDistTransport, store_of, watch_of
from paceline.collectives.wait import finish
from paceline.collectives.watch import StoreWatch
from paceline.errors import CollectiveMismatch, UsageError


def all_reduce(
    tensor: torch.Tensor,
    op: str | Op = "sum",
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
) -> torch.Tensor:
    """Combine `tensor` over all ranks of `group`, in place, and return it.

    `op` is "sum", "mean", "product", "min" or "max"; between at most 2 ranks also "tree". Raises CollectiveMismatch on
    every rank if the ranks are not about to do the same, PeerLost if a rank dies, PeerAbsent if one has not come after
    `timeout` seconds.
    """
    op = _op(op)
    call = _Call(group, describe("all_reduce", tensor, op.value), timeout)
    with torch.no_grad():
        flat = tensor if tensor.is_sparse else tensor.contiguous()
        call.finish(call.transport.all_reduce(flat, op))
        if flat is not tensor:
            tensor.copy_(flat)
    return tensor


def all_gather(
    tensor: torch.Tensor, *, group: dist.ProcessGroup | None = None, timeout: float | None = None
) -> list[torch.Tensor]:
    """The tensors of all ranks, in rank order. All must have the same shape and dtype. Errors as in `all_reduce`."""
    call = _Call(group, describe("all_gather", tensor, ""), timeout)
    size = call.transport.size
    with torch.no_grad():
        out = torch.empty(size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        call.finish(call.transport.all_gather(out, tensor.contiguous()))
    return (
        [part.view(tensor.shape) for part in out.chunk(size)]
        if tensor.numel()
        else [tensor.clone() for _ in range(size)]
    )


def broadcast(
    tensor: torch.Tensor, src: int = 0, *, group: dist.ProcessGroup | None = None, timeout: float | None = None
) -> torch.Tensor:
    """Overwrite `tensor` with that of rank `src` of the group, in place, and return it. Errors as in `all_reduce`."""
    call = _Call(group, describe("broadcast", tensor, f"src={src}"), timeout)
    with torch.no_grad():
        flat = tensor.contiguous()
        call.finish(call.transport.broadcast(flat, src))
        if flat is not tensor:
            tensor.copy_(flat)
    return tensor


def barrier(*, group: dist.ProcessGroup | None = None, timeout: float | None = None) -> None:
    """Return once every rank of the group is here. Errors as in `all_reduce`. Does not wait for device streams."""
    _Call(group, "barrier()", timeout)  # that all ranks have posted this call is all there is to a barrier


class _Call:
    """One checked call: agreement about it is reached on construction."""

    def __init__(self, group: dist.ProcessGroup | None, text: str, timeout: float | None) -> None:
        self._text = text
        self._ends = None if timeout is None else time.monotonic() + timeout
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is None:
            self.transport: Transport = LocalTransport()
            return
        if not isinstance(group, dist.ProcessGroup):
            raise UsageError(f"group must be a process group that this rank is a member of, got {group!r}")
        store = store_of(group)
        watch = watch_of(group, line="checked", announce=False)
        self.transport = TorchDistTransport(group, watch=watch)
        if store is not None and group.size() > 1:
            self._agree(store, watch)

    def finish(self, work: Work) -> None:
        finish(work, what=self._text, watch=self.transport.watch, timeout_s=self._left_s())

    def _agree(self, store: Store, watch: StoreWatch) -> None:
        header = _Header(store, self.transport.rank, self.transport.size, self._text, watch)
        posted = StoreCall(header.exchange)
        try:
            finish(posted, what=f"the start of {self._text}", watch=watch, timeout_s=self._left_s())
        finally:
            posted.stop()
        calls = posted.result()
        if len(set(calls)) > 1:
            usual, _ = Counter(calls).most_common(1)[0]
            told = "; ".join(f"rank {rank} called {call}" for rank, call in enumerate(calls))
            odd = [rank for rank, call in enumerate(calls) if call != usual]
            raise CollectiveMismatch(
                f"the ranks are about to do different things: {told}. Every rank must issue the same collectives, "
                f"with the same shape, dtype, op and root, in the same order; nothing was sent",
                ranks=odd,
            )

    def _left_s(self) -> float | None:
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())


class _Header:
    """What one rank is about to do, posted on the store where all ranks see it.

    The number of the call is counted on the store, so that no state outlives the group.
    """

    def __init__(self, store: Store, rank: int, size: int, text: str, watch: StoreWatch) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._text = text
        self._watch = watch

    def exchange(self, call: StoreCall[list[str]]) -> list[str]:
        store, counter = self._store, f"paceline/calls/{self._rank}"
        number = store.add(counter, 1)
        if number == 1:
            self._watch.announce()
        store.set(self._key(number, self._rank), f"{number} {self._text}")
        pause_s = 0.00005
        while not (found := self._read(number)):
            if not call.pause(pause_s):
                # Given up: as if the call had never been made, so that a second try finds the others.
                store.set(self._key(number, self._rank), "")
                store.add(counter, -1)
                return []
            pause_s = min(1.2 * pause_s, 0.02)
        return found

    def _read(self, number: int) -> list[str]:
        """What each rank said about this call, or nothing if some have not come to it yet."""
        keys = [self._key(number, peer) for peer in range(self._size) if peer != self._rank]
        if number <= 2 and not self._store.check(keys):  # `multi_get` waits for a key that was never set
            return []
        said = [text.decode().partition(" ") for text in self._store.multi_get(keys)]
        if any(found != str(number) for found, _, _ in said):
            return []
        texts = [text for _, _, text in said]
        texts.insert(self._rank, self._text)
        return texts

    def _key(self, number: int, rank: int) -> str:
        # Two places are enough: who posts a call has seen that all ranks came to the one before, so all have read the
        # one before that.
        return f"paceline/call/{number % 2}/{rank}"


def _op(op: str | Op) -> Op:
    try:
        return Op(op)
    except ValueError:
        accepted = ", ".join(repr(known.value) for known in Op)
        raise UsageError(f"op must be one of {accepted}, got {op!r}") from None
