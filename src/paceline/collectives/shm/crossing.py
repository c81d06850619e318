"""An all_reduce between hosts: the ranks that own the same slice, one per host, combine what their hosts made of it.

Hosts announce what they are about to combine before any of it is sent: gloo would wait forever, or end the
process, if sizes differ. The notes have connections of their own, so that they can overtake sums.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from paceline.collectives.protocols import Op, Transport, Work, mismatch
from paceline.collectives.shm.codes import CodedCall
from paceline.collectives.shm.summing import Summing
from paceline.collectives.torch_dist import TorchDistTransport
from paceline.collectives.watch import StoreWatch
from paceline.errors import CollectiveMismatch

DIFFERENT = -1  # in place of a code: the ranks of this host have called different collectives


class Channel:
    """The connections to the ranks of other hosts that own the same slice. A rank that owns none has no `groups`."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], hosts: Sequence[Sequence[int]]) -> None:
        """`groups`: one for notes and one for sums."""
        self._transports = [_uncounted(group) for group in groups]
        self._hosts = hosts

    def announce(self, call: CodedCall, error: CollectiveMismatch | None) -> "HostCrossing | None":
        """Tell the other hosts which collective comes next here, or that the ranks of this one differ (`error`).

        None if this rank owns no slice.
        """
        if not self._transports:
            return None
        notes, sums = self._transports
        return HostCrossing(call, error, notes, sums, self._hosts)


def _uncounted(group: dist.ProcessGroup) -> TorchDistTransport:
    """Its collectives are not counted by the group's watch: channels differ in what they send."""
    return TorchDistTransport(group, watch=StoreWatch(None, group.rank(), group.size()))


class HostCrossing:
    """One all_reduce of one channel."""

    def __init__(
        self,
        call: CodedCall,
        error: CollectiveMismatch | None,
        notes: Transport,
        sums: Transport,
        hosts: Sequence[Sequence[int]],
    ) -> None:
        self._op = call.op
        self._error = error
        self._sums = sums
        self._hosts = hosts
        code = call.code if error is None else DIFFERENT
        self._said = torch.empty(2 * notes.size, dtype=torch.int64, device="cpu")
        self._note = notes.all_gather(self._said, torch.tensor([code, call.numel], dtype=torch.int64, device="cpu"))
        self._summing: Summing | None = None
        self._work: Work | None = None
        self._departed = False

    def sum(self, summing: Summing) -> None:
        """Combine the slice inside this host; the result will be combined with those of the other hosts."""
        summing.sum()
        self._summing = summing

    def departed(self) -> bool:
        """Whether the slice has been sent, which happens once all hosts are known to make the same call. Never blocks.

        Raises CollectiveMismatch, on all hosts, if they do not.
        """
        if not self._departed and self._note.done() and self._note.wait(0):
            self._check()
            assert self._summing is not None
            if self._summing.result.numel():
                op = Op.SUM if self._op is Op.MEAN else self._op  # `spread` divides
                self._work = self._sums.all_reduce(self._summing.result, op)
            self._departed = True
        return self._departed

    def arrived(self) -> bool:
        """Whether all copies inside this host hold the result of all hosts. Never blocks."""
        if not self.departed() or not (self._work is None or (self._work.done() and self._work.wait(0))):
            return False
        assert self._summing is not None
        self._summing.spread()
        return True

    def _check(self) -> None:
        calls = [CodedCall(*row) for row in self._said.view(-1, 2).tolist()]
        if len(set(calls)) == 1 and calls[0].code != DIFFERENT:
            return
        if self._error is not None:  # it is more specific
            raise self._error
        called = {
            _names(ranks): "different collectives" if call.code == DIFFERENT else call
            for ranks, call in zip(self._hosts, calls, strict=True)
        }
        raise CollectiveMismatch(mismatch(called), ranks=sorted(rank for ranks in self._hosts for rank in ranks))


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} (one host)"
