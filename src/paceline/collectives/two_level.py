"""Several hosts with several ranks each: shared memory inside a host, torch.distributed between hosts.

Each host sums a bucket in its own memory, the hosts exchange one sum each, and the result is spread inside each host.
So a bucket crosses the network once per host and not once per rank. The buckets are cut into as many slices as the
host with the fewest ranks has ranks; the c-th rank of every host owns slice c, and these ranks form channel c.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.collectives.api import Op, Transport, Watch, Work, check_reducible, check_tree
from paceline.collectives.own_group import form_own_group, own_backends
from paceline.collectives.peers import StoreCall
from paceline.collectives.shm import record
from paceline.collectives.shm.crossing import DIFFERENT
from paceline.collectives.shm.meet import tell_all
from paceline.collectives.shm.mesh import Mesh
from paceline.collectives.shm.presence import Refusal
from paceline.collectives.shm.transport import ShmTransport
from paceline.collectives.torch_dist import TorchDistTransport
from paceline.collectives.wait import finish
from paceline.collectives.watch import StoreWatch
from paceline.errors import CollectiveMismatch

Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]  # for notes and for sums


class Channel:
    """The ranks that own the same slice, one per host. A rank that owns none has no groups.

    Hosts tell each other what they are about to combine before any of it is sent: gloo would wait without end, or end
    the process, if sizes differ. The notes have connections of their own, so that they can travel ahead of sums.
    """

    def __init__(self, groups: Groups | None, hosts: Sequence[Sequence[int]]) -> None:
        self._lines = None if groups is None else (_quiet(groups[0]), _quiet(groups[1]))
        self._hosts = hosts

    def announce(self, word: int, numel: int) -> "HostCrossing | None":
        return None if self._lines is None else HostCrossing((word, numel), *self._lines, self._hosts)


def _quiet(group: dist.ProcessGroup) -> TorchDistTransport:
    """Its collectives are not noted by the group's watch: channels differ in what they send."""
    return TorchDistTransport(group, watch=StoreWatch(None, group.rank(), group.size(), announce=False))


class HostCrossing:
    """One all_reduce of one channel."""

    def __init__(
        self, call: tuple[int, int], notes: Transport, sums: Transport, hosts: Sequence[Sequence[int]]
    ) -> None:
        self._sums = sums
        self._hosts = hosts
        self._said = torch.empty(2 * notes.size, dtype=torch.int64, device="cpu")
        self._note = notes.all_gather(self._said, torch.tensor(call, dtype=torch.int64, device="cpu"))
        self._part: tuple[torch.Tensor, Op] | None = None
        self._work: Work | None = None
        self._departed = False

    def send(self, part: torch.Tensor, op: Op) -> None:
        self._part = part, Op.SUM if op is Op.MEAN else op  # the engine divides

    def departed(self) -> bool:
        if not self._departed and self._note.done() and self._note.wait(0):
            self._check()
            assert self._part is not None
            if self._part[0].numel():
                self._work = self._sums.all_reduce(*self._part)
            self._departed = True
        return self._departed

    def arrived(self) -> bool:
        return self.departed() and (self._work is None or (self._work.done() and self._work.wait(0)))

    def _check(self) -> None:
        calls = [(word, numel) for word, numel in self._said.view(-1, 2).tolist()]
        if len(set(calls)) == 1 and calls[0][0] != DIFFERENT:
            return
        pairs = zip(self._hosts, calls, strict=True)
        told = "; ".join(f"{_names(ranks)} called {_in_words(*call)}" for ranks, call in pairs)
        raise CollectiveMismatch(
            f"{told}. Every rank must issue the same collectives in the same order",
            ranks=sorted(rank for ranks in self._hosts for rank in ranks),
        )


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} (one host)"


def _in_words(word: int, numel: int) -> str:
    return "different things" if word == DIFFERENT else record.text_of(word, numel)


def form_channel(
    place: Store,
    base: TorchDistTransport,
    hosts: Sequence[Sequence[int]],
    *,
    watch: StoreWatch,
    timeout_s: float | None,
) -> Channel | Refusal:
    """Connect this rank with its like on the other hosts. All ranks of the group ask, and go on only if all succeed."""
    home = next(number for number, ranks in enumerate(hosts) if base.rank in ranks)
    seat = list(hosts[home]).index(base.rank)
    gloo = {name: like for name, like in own_backends(base.group).items() if name == "gloo"}
    made: Groups | None = None
    reason = "" if gloo else f"rank {base.rank} has no gloo in its group to reach other hosts with"
    if gloo and seat < min(map(len, hosts)):
        stores = [PrefixStore(f"channel {seat} {what}", place) for what in ("notes", "sums")]

        def form(_: object) -> Groups | str:
            try:
                notes, sums = (form_own_group(gloo, store, home, len(hosts)) for store in stores)
                return notes, sums
            except RuntimeError as error:
                return f"rank {base.rank} could not connect to the other hosts: {error}"

        making = StoreCall(form)  # on a thread: the constructor blocks until every rank is there
        either = _Either(making, StoreCall(lambda call: _await_failure(place, call)))
        try:
            finish(either, what="the forming of the channels between hosts", watch=watch, timeout_s=timeout_s)
        finally:
            either.stop()
        formed = making.result() if making.done() else None
        if isinstance(formed, str):
            reason = formed
        else:
            made = formed
    if reason:
        place.set("failed", reason)
    told = tell_all(place, "channels", base.rank, base.size, reason, watch, timeout_s)
    reasons = [text.decode() for text in told if text]
    return Refusal(reasons[0]) if reasons else Channel(made, hosts)


def _await_failure(place: Store, call: StoreCall[None]) -> None:
    while call.pause(0.05) and not place.check(["failed"]):
        pass


class _Either:
    """Done when the channel stands, or when another rank has failed to make its own."""

    def __init__(self, making: StoreCall[Groups | str], failing: StoreCall[None]) -> None:
        self._making = making
        self._failing = failing

    def done(self) -> bool:
        return self._making.done() or self._failing.done()

    def wait(self, seconds: float) -> bool:
        return self._making.wait(seconds) or self._failing.done()

    def stop(self) -> None:
        self._failing.stop()


class TwoLevelTransport:
    """Buckets take the way through shared memory and the channels; everything else goes through `flat`."""

    def __init__(
        self,
        mesh: Mesh,
        channel: Channel,
        flat: TorchDistTransport,
        hosts: Sequence[Sequence[int]],
        *,
        watch: StoreWatch,
        again: Callable[[float | None], Transport],
    ) -> None:
        """`again` makes another one over the same ranks."""
        self._flat = flat
        self._again = again
        self._inside = ShmTransport(
            mesh,
            watch=watch,
            fallback=flat,
            between=channel,
            owners=min(map(len, hosts)),
            divide_by=flat.size,
        )

    @property
    def rank(self) -> int:
        return self._flat.rank

    @property
    def size(self) -> int:
        return self._flat.size

    @property
    def watch(self) -> Watch:
        return self._inside.watch

    @property
    def alone(self) -> bool:
        return False

    @property
    def inline(self) -> bool:
        return False  # what takes long, the way between hosts, goes on beside the computing thread

    def averages(self, device: torch.device) -> bool:
        return device.type == "cpu" or self._flat.averages(device)

    def trees(self, device: torch.device) -> bool:
        return False  # hosts may hold any ranks, and there may be any number of them

    def queues(self, device: torch.device) -> bool:
        return self._flat.queues(device)

    def exchanges(self, device: torch.device) -> bool:
        return self._flat.exchanges(device)

    def progress(self) -> None:
        self._inside.progress()

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._inside.allocate(numel, dtype, device)

    def all_reduce(self, flat: torch.Tensor, op: Op = Op.SUM) -> Work:
        check_reducible(flat, op)
        check_tree(op, self.trees(flat.device))
        crosses = flat.is_floating_point() or flat.is_complex()
        if crosses and self._inside.holds(flat):
            return self._inside.all_reduce(flat, op)
        return self._flat.all_reduce(flat, op)

    def broadcast(self, flat: torch.Tensor, root: int = 0) -> Work:
        return self._flat.broadcast(flat, root)

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> Work:
        return self._flat.all_gather(out, part)

    def exchange(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        return self._flat.exchange(out, flat)

    def apart(self, timeout_s: float | None = None) -> Transport:
        return self._again(timeout_s)

    def close(self) -> None:
        self._inside.close()
