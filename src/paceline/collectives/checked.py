"""The public collectives: they compare what every rank is about to do before any byte moves.

torch itself does not: calls in different order or of different shapes give wrong sums silently, or end the process.
Here each rank posts one line about its call on the group's store and reads those of the others; if they differ, every
rank raises CollectiveMismatch and nothing was started, so the group stays usable. The check costs a few round trips to
the store. A group without a store (one that torch did not make) is used unchecked.

Why the line of the script is compared
--------------------------------------
Two sums of one shape, called in one order on rank 0 and in the other on rank 1, differ in nothing else. So calls belong
together when they are of one kind, shape, dtype, op and root, and come from the same lines of the script. Calls that
intentionally come from different lines, such as the two branches of `if rank == 0`, pass the same `tag`, which is
then compared instead of the lines. See `collectives.call_site` for what counts as the same line.
"""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from paceline.collectives.call_site import CallFrame, call_site, describe_site, difference
from paceline.collectives.group import finish
from paceline.collectives.local import LocalTransport
from paceline.collectives.peers import FOREIGN
from paceline.collectives.protocols import CollectiveCall, Op, Transport, Work
from paceline.collectives.store_call import StoreCall
from paceline.collectives.store_gather import StoreGather
from paceline.collectives.torch_dist import TorchDistTransport
from paceline.collectives.torch_store import store_of, watch_of
from paceline.collectives.watch import StoreWatch
from paceline.errors import CollectiveMismatch, Malformed, MessageDamaged, PeerAbsent, UsageError
from paceline.typed_json import read_json

_AS_POSTED: Any = tuple[str, str | None, tuple[tuple[str, int, str, bool], ...]]
BRIEF_S = 5.0  # a shorter timeout ends a wait before a deadlock can be detected


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
    every rank if the ranks make different calls, PeerLost if a rank dies, PeerAbsent if one has not joined after
    `timeout` seconds.

    Calls match if they come from the same line of the script. Calls on different lines that belong together
    (`if rank == 0: …, else: …`) need the same `tag` on all ranks.
    """
    op = _op(op)
    call = _Call(group, str(CollectiveCall.of("all_reduce", tensor, op.value)), timeout, tag)
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
    call = _Call(group, str(CollectiveCall.of("all_gather", tensor, "")), timeout, tag)
    size = call.transport.size
    with torch.no_grad():
        out = torch.empty(size, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
        call.finish(call.transport.all_gather(out, tensor.contiguous()))
    return list(out)


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
    call = _Call(group, str(CollectiveCall.of("broadcast", tensor, f"src={src}")), timeout, tag)
    with torch.no_grad():
        flat = tensor.contiguous()
        call.finish(call.transport.broadcast(flat, src))
        if flat is not tensor:
            tensor.copy_(flat)
    return tensor


def barrier(*, group: dist.ProcessGroup | None = None, timeout: float | None = None, tag: str | None = None) -> None:
    """Return once every rank of the group has reached it. Does not wait for device streams.

    Errors and `tag` are those of `all_reduce`.
    """
    _Call(group, "barrier()", timeout, tag)  # a barrier is complete when all ranks have posted this call


def named_barrier(name: str, *, group: dist.ProcessGroup | None, timeout: float | None) -> None:
    """A barrier at the start of a method such as "Checkpointer.save(5)", which all ranks must call.

    Only the name is compared, and messages show it instead of "barrier()".
    """
    _Call(group, name, timeout, None, compares_site=False)


@dataclass(frozen=True)
class _PostedCall:
    """What a rank posts about its call."""

    call: str
    tag: str | None
    site: tuple[CallFrame, ...]

    def encode(self) -> str:
        return json.dumps([self.call, self.tag, self.site])

    @classmethod
    def decode(cls, text: str, rank: int) -> "_PostedCall":
        """The call that a rank has posted. Raises MessageDamaged if it is malformed."""
        try:
            call, tag, site = read_json(_AS_POSTED, text, f"the call of rank {rank}")
        except Malformed as error:
            raise MessageDamaged(f"{error}; {FOREIGN}", ranks=[rank]) from error
        return cls(call, tag, tuple(CallFrame(*frame) for frame in site))

    def differs(self, other: "_PostedCall") -> int | None:
        """How many frames must be shown for the difference to be seen; None if the two calls belong together."""
        if (self.call, self.tag) != (other.call, other.tag):
            return 1
        place = None if self.tag is not None else difference(self.site, other.site)
        return None if place is None else place + 1

    def describe(self, depth: int) -> str:
        tag = "" if self.tag is None else f" with tag={self.tag!r}"
        return f"called {self.call}{tag}{describe_site(self.site, depth)}"


def _compare(calls: Sequence[_PostedCall]) -> None:
    """Raise unless all ranks make the same call. All ranks come to the same conclusion, with the same text."""
    if len(set(calls)) == 1:
        return
    usual, _ = Counter(calls).most_common(1)[0]
    odd = {rank: depth for rank, call in enumerate(calls) if (depth := usual.differs(call)) is not None}
    if not odd:
        return
    described = "; ".join(f"rank {rank} {call.describe(max(odd.values()))}" for rank, call in enumerate(calls))
    if len({(call.call, call.tag) for call in calls}) > 1:
        rule = "with the same shape, dtype, op, root and tag, in the same order; nothing was sent"
    else:
        rule = (
            "in the same order; nothing was sent. If these calls belong together although they are on different "
            'lines, give them the same tag="..." on all ranks'
        )
    raise CollectiveMismatch(
        f"the ranks are about to run different collectives: {described}. "
        f"Every rank must issue the same collectives, {rule}",
        ranks=sorted(odd),
    )


class _Call:
    """One checked call: agreement about it is reached on construction."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        text: str,
        timeout: float | None,
        tag: str | None,
        *,
        compares_site: bool = True,
    ) -> None:
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
        watch = watch_of(group, sequence="checked")
        watch.brief = timeout is not None and timeout < BRIEF_S
        self.transport = TorchDistTransport(group, watch=watch)
        if store is not None and group.size() > 1:
            site = call_site(skip=__file__) if compares_site else ()
            self._agree(store, watch, _PostedCall(text, tag, site))

    def finish(self, work: Work) -> None:
        finish(work, what=self._text, watch=self.transport.watch, timeout_s=self._left_s())

    def _agree(self, store: Store, watch: StoreWatch, own: _PostedCall) -> None:
        gather = StoreGather(store, "paceline/call", self.transport.rank, self.transport.size, own.encode())
        watch.calls.began(own.call)
        posted = StoreCall(gather.run)
        try:
            finish(posted, what=f"the start of {self._text}", watch=watch, timeout_s=self._left_s())
        except BaseException as error:
            posted.stop()
            if not posted.found():
                watch.calls.took_back()
                raise
            if not isinstance(error, PeerAbsent):  # the last rank arrived while this one timed out: the call counts
                raise
        _compare([_PostedCall.decode(text, rank) for rank, text in enumerate(posted.result())])

    def _left_s(self) -> float | None:
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())


def _op(op: str | Op) -> Op:
    try:
        return Op(op)
    except ValueError:
        accepted = ", ".join(repr(known.value) for known in Op)
        raise UsageError(f"op must be one of {accepted}, got {op!r}") from None
