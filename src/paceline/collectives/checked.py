"""The public collectives: they compare what every rank is about to do before any byte moves.

torch itself does not: calls in different order or of different shapes give wrong sums in silence, or end the process.
Here each rank posts one line about its call on the group's store and reads those of the others; if they differ, every
rank raises CollectiveMismatch and nothing was started, so the group stays usable. The check costs a few round trips to
the store. A group without a store (one that torch did not make) is used unchecked.

Why the line of the script is compared
--------------------------------------
Two sums of one shape, called in one order on rank 0 and in the other on rank 1, differ in nothing else. So calls belong
together when they are of one kind, shape, dtype, op and root, and come from the same lines of the script. Calls that
are meant to meet from different lines, such as the two branches of `if rank == 0`, say so by the same `tag`, which is
then compared instead of the lines. See `collectives.call_site` for what counts as the same line.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from paceline.collectives.api import Op, Transport, Work, describe
from paceline.collectives.call_site import CallFrame, call_site, difference, told
from paceline.collectives.local import LocalTransport
from paceline.collectives.peers import StoreCall
from paceline.collectives.torch_dist import TorchDistTransport, store_of, watch_of
from paceline.collectives.wait import finish
from paceline.collectives.watch import StoreWatch
from paceline.errors import CollectiveMismatch, PeerAbsent, UsageError

BRIEF_S = 5.0  # a shorter timeout ends a wait sooner than a deadlock is found


def all_reduce(
    tensor: torch.Tensor,
    op: str | Op = "sum",
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    tag: str | None = None,
) -> torch.Tensor:
    """Combine `tensor` over all ranks of `group`, in place, and return it.

    `op` is "sum", "mean", "product", "min" or "max"; between at most 2 ranks also "tree". Raises CollectiveMismatch on
    every rank if the ranks are not about to do the same, PeerLost if a rank dies, PeerAbsent if one has not come after
    `timeout` seconds.

    Ranks do the same when they call it from the same line of the script. Calls on different lines that belong together
    (`if rank == 0: …, else: …`) are given the same `tag` on all ranks.
    """
    op = _op(op)
    call = _Call(group, describe("all_reduce", tensor, op.value), timeout, tag)
    with torch.no_grad():
        flat = tensor if tensor.is_sparse else tensor.contiguous()
        call.finish(call.transport.all_reduce(flat, op))
        if flat is not tensor:
            tensor.copy_(flat)
    return tensor


def all_gather(
    tensor: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    tag: str | None = None,
) -> list[torch.Tensor]:
    """The tensors of all ranks, in rank order. All must have the same shape and dtype.

    Errors and `tag` are those of `all_reduce`.
    """
    call = _Call(group, describe("all_gather", tensor, ""), timeout, tag)
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
    tensor: torch.Tensor,
    src: int = 0,
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float | None = None,
    tag: str | None = None,
) -> torch.Tensor:
    """Overwrite `tensor` with that of rank `src` of the group, in place, and return it.

    Errors and `tag` are those of `all_reduce`.
    """
    call = _Call(group, describe("broadcast", tensor, f"src={src}"), timeout, tag)
    with torch.no_grad():
        flat = tensor.contiguous()
        call.finish(call.transport.broadcast(flat, src))
        if flat is not tensor:
            tensor.copy_(flat)
    return tensor


def barrier(*, group: dist.ProcessGroup | None = None, timeout: float | None = None, tag: str | None = None) -> None:
    """Return once every rank of the group is here. Does not wait for device streams.

    Errors and `tag` are those of `all_reduce`.
    """
    _Call(group, "barrier()", timeout, tag)  # that all ranks have posted this call is all there is to a barrier


@dataclass(frozen=True)
class _CallLine:
    """What a rank posts about its call."""

    call: str
    tag: str | None
    site: tuple[CallFrame, ...]

    def encode(self) -> str:
        return json.dumps([self.call, self.tag, self.site])

    @classmethod
    def decode(cls, text: str) -> "_CallLine":
        call, tag, site = json.loads(text)
        return cls(call, tag, tuple(CallFrame(*frame) for frame in site))

    def differs(self, other: "_CallLine") -> int | None:
        """How many frames must be shown for the difference to be seen; None if the two calls belong together."""
        if (self.call, self.tag) != (other.call, other.tag):
            return 1
        place = None if self.tag is not None else difference(self.site, other.site)
        return None if place is None else place + 1

    def tell(self, depth: int) -> str:
        tag = "" if self.tag is None else f" with tag={self.tag!r}"
        return f"called {self.call}{tag}{told(self.site, depth)}"


def _compare(lines: Sequence[_CallLine]) -> None:
    """Raise unless all ranks are about to do the same. All ranks come to the same conclusion, in the same words."""
    if len(set(lines)) == 1:
        return
    usual, _ = Counter(lines).most_common(1)[0]
    odd = {rank: depth for rank, line in enumerate(lines) if (depth := usual.differs(line)) is not None}
    if not odd:
        return
    calls = "; ".join(f"rank {rank} {line.tell(max(odd.values()))}" for rank, line in enumerate(lines))
    if len({(line.call, line.tag) for line in lines}) > 1:
        rule = "with the same shape, dtype, op, root and tag, in the same order; nothing was sent"
    else:
        rule = (
            "in the same order; nothing was sent. If these calls belong together although they are on different "
            'lines, give them the same tag="..." on all ranks'
        )
    raise CollectiveMismatch(
        f"the ranks are about to do different things: {calls}. Every rank must issue the same collectives, {rule}",
        ranks=sorted(odd),
    )


class _Call:
    """One checked call: agreement about it is reached on construction."""

    def __init__(self, group: dist.ProcessGroup | None, text: str, timeout: float | None, tag: str | None) -> None:
        if tag is not None and not isinstance(tag, str):
            raise UsageError(f"tag must be text that is the same on all ranks, got {tag!r}")
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
        watch.brief = timeout is not None and timeout < BRIEF_S
        self.transport = TorchDistTransport(group, watch=watch)
        if store is not None and group.size() > 1:
            self._agree(store, watch, _CallLine(text, tag, call_site(skip=__file__)))

    def finish(self, work: Work) -> None:
        finish(work, what=self._text, watch=self.transport.watch, timeout_s=self._left_s())

    def _agree(self, store: Store, watch: StoreWatch, line: _CallLine) -> None:
        header = _Header(store, self.transport.rank, self.transport.size, line.encode(), watch)
        watch.calls.began(line.call)
        posted = StoreCall(header.exchange)
        try:
            finish(posted, what=f"the start of {self._text}", watch=watch, timeout_s=self._left_s())
        except BaseException as error:
            posted.stop()
            if not posted.found():
                watch.calls.took_back()
                raise
            if not isinstance(error, PeerAbsent):  # the last rank has come while this one gave up: it counts
                raise
        _compare([_CallLine.decode(text) for text in posted.result()])

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
        self._text = text  # of the line
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
                return self._give_up(number)
            pause_s = min(1.2 * pause_s, 0.02)
        return found

    def _give_up(self, number: int) -> list[str]:
        """As if the call had never been made, so that a second try finds the others.

        Unless the last of them has come meanwhile: then some may have seen this rank there, and gone on.
        """
        key = self._key(number, self._rank)
        self._store.set(key, "")
        if found := self._read(number):
            self._store.set(key, f"{number} {self._text}")
            return found
        self._store.add(f"paceline/calls/{self._rank}", -1)
        return []

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
