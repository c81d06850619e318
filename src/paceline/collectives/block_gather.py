"""Blocks of several tensors, of which every rank holds some, gathered by one collective."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch

from paceline.collectives.group import Group
from paceline.collectives.protocols import Gather, ShardedTransport, Work
from paceline.collectives.stream_work import used_here
from paceline.collectives.subgroup import ranks_of
from paceline.device_clock import stamp_end
from paceline.errors import CollectiveMismatch
from paceline.layout import aligned
from paceline.trace import Moment, Trace
from paceline.traffic import Collective, CollectiveKind

TAGS = 128  # representable exactly in every floating point type
VERSIONS_APART = 37  # in tags: the next version of one gather is not taken for another gather


class _Flight(NamedTuple):
    """A gather under way."""

    work: Work
    rows: torch.Tensor | None = None  # where the blocks come to, if not where they go
    sent: torch.Tensor | None = None  # on a device, held as `StreamWork.order` asks for


class BlockGather:
    """Gathers blocks of one type. It may be reused, by all ranks in the same order."""

    def __init__(
        self,
        own: Sequence[torch.Tensor],
        blocks: Sequence[Sequence[torch.Tensor]],
        tag: int = 0,
        trace: Trace | None = None,
        of: str = "",
    ) -> None:
        """`own`: this rank's flat blocks. `blocks`: the targets of each rank's blocks; if this rank's own are in place
        already, they are not copied. `tag` identifies the gather: ranks must pass the same one. Blocks may be written
        to from `start` on, and not only in `finish`. `trace`: where to leave stamps, as a gather of the parameters `of`
        a module."""
        self._own = list(own)
        self._blocks = [list(of_rank) for of_rank in blocks]
        self._sizes = [[block.numel() for block in of_rank] for of_rank in blocks]
        self._number = tag
        self.version = 0  # of the gathered values: must be equal on all ranks, too
        self._like = next(block for of_rank in blocks for block in of_rank)
        # Aligned, with room for the tag: NCCL moves rows that are not a fifth slower (two ranks over sockets).
        self._width = aligned(max(map(sum, self._sizes)) + 1, self._like.dtype)
        self._flight: _Flight | None = None
        self._trace = trace
        self._collective = Collective(CollectiveKind.GATHER, sum(map(sum, self._sizes)) * self._like.itemsize, of)

    @property
    def _tag(self) -> int:
        return (self._number + VERSIONS_APART * self.version) % TAGS

    def start(self, group: Group) -> None:
        """Start, unless it is in progress."""
        if self._flight is not None:
            return
        if group.transport.traits(self._like.device).sharded:
            transport = cast(ShardedTransport, group.transport)
            self.stamp(Moment.LAUNCHED)
            self._flight = _Flight(transport.gather_blocks(self._own, self._blocks, self._tag))
            return
        sent = self._like.new_empty(self._width)
        if self._own:
            sizes = self._sizes[group.rank]
            torch._foreach_copy_(list(sent[: sum(sizes)].split(sizes)), self._own)
        sent[-1:].fill_(self._tag)  # an assignment would copy it from the host, and wait
        rows = self._like.new_empty(group.size, self._width)
        self.stamp(Moment.LAUNCHED)
        work = group.transport.all_gather(rows.view(-1), sent)
        self._flight = _Flight(work, rows, sent if sent.is_cuda else None)
        if self._trace is not None and self._trace.device_times:
            stamp_end(self._trace, work, -1, self._collective)

    def finish(self, group: Group, what: str, *, beside: bool = False) -> None:
        """Wait for the blocks of all ranks, and copy them to their targets. `beside`: on a side stream, where no
        computation waits yet."""
        self.start(group)
        assert self._flight is not None
        work, rows, _ = self._flight
        if not beside:
            self.stamp(Moment.WAIT_ENTERED)
        try:
            group.wait(work, what)
        except Exception:
            self._flight = None
            raise
        self._flight = None  # only now: after an interrupt the wait is repeated, for data already sent
        if not beside:
            self.stamp(Moment.WAIT_LEFT)
        if rows is None:
            self._check_tags(cast(Gather, work).tags, group, what)
            return
        if not rows.is_cuda:  # there a host would have to wait for it
            self._check_tags(rows[:, -1].tolist(), group, what)
        for rank, (blocks, sizes) in enumerate(zip(self._blocks, self._sizes, strict=True)):
            if blocks and not (rank == group.rank and blocks[0].data_ptr() == self._own[0].data_ptr()):
                torch._foreach_copy_(blocks, rows[rank, : sum(sizes)].split(sizes))
        used_here(rows)

    def comes(self, group: Group, what: str, seconds: float) -> bool:
        """Whether the blocks of all ranks arrive within `seconds`. `finish` must still be called."""
        return self._flight is None or group.wait_a_moment(self._flight.work, what, seconds)

    def forget(self) -> None:
        """Drop a gather over a group that has ended."""
        self._flight = None

    def discard(self, group: Group) -> None:
        """Wait for the gather in progress and drop it."""
        if self._flight is not None:
            flight, self._flight = self._flight, None
            group.wait(flight.work, "parameters that are not needed any more")

    def stamp(self, moment: Moment) -> None:
        """Leave a stamp, in the backward of the newest one."""
        if self._trace is not None:
            self._trace.stamp(moment, self._trace.backward, collective=self._collective)

    def _check_tags(self, tags: Sequence[float], group: Group, what: str) -> None:
        if strange := [rank for rank, tag in zip(ranks_of(group), tags, strict=True) if tag != self._tag]:
            raise CollectiveMismatch(
                f"rank {ranks_of(group)[group.rank]} is gathering {what} while rank {strange[0]} is gathering "
                f"something else, or made another number of updates; all ranks must run the same parts of the model "
                f"in the same order, and call optimizer.step() equally often",
                ranks=strange,
            )
