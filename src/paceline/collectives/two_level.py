"""Several hosts with several ranks each: shared memory inside a host, torch.distributed between hosts.

Each host sums a bucket in its own memory, the hosts exchange one sum each, and the result is spread inside each host.
So a bucket crosses the network once per host and not once per rank. The buckets are cut into as many slices as the
host with the fewest ranks has ranks; the c-th rank of every host owns slice c, and these ranks form channel c.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from paceline.collectives.own_group import form_own_group, own_backends
from paceline.collectives.protocols import Op, Traits, Transport, Work, check_reducible, check_tree
from paceline.collectives.shm.crossing import Channel
from paceline.collectives.shm.mesh import Mesh
from paceline.collectives.shm.transport import ShmTransport
from paceline.collectives.store_call import StoreCall
from paceline.collectives.store_gather import Rendezvous
from paceline.collectives.torch_dist import TorchDistTransport

# The slow part, between hosts, runs in the background. Hosts may hold any ranks, and there may be any number of them,
# so no sum follows the tree.
_ON_HOST = Traits(native_mean=True, all_to_all=True)


class TwoLevelTransport(ShmTransport):
    """Buckets go through shared memory and the channels; everything else goes through `flat`."""

    def __init__(
        self,
        mesh: Mesh,
        channel: Channel,
        flat: TorchDistTransport,
        hosts: Sequence[Sequence[int]],
        again: Callable[[float | None], Transport],
    ) -> None:
        super().__init__(
            mesh,
            watch=flat.watch,
            fallback=flat,
            again=again,
            channel=channel,
            owners=min(map(len, hosts)),
            divide_by=flat.size,
        )
        self.rank = flat.rank
        self.size = flat.size

    def traits(self, device: torch.device) -> Traits:
        if device.type == "cpu":
            return _ON_HOST
        return replace(self._fallback.traits(device), single=False, progress_on_caller=False, tree_sum=False)

    def all_reduce(self, flat: torch.Tensor, op: Op = Op.SUM) -> Work:
        check_reducible(flat, op)
        check_tree(op, self.traits(flat.device).tree_sum)
        crosses = flat.is_floating_point() or flat.is_complex()
        return super().all_reduce(flat, op) if crosses and self.holds(flat) else self._fallback.all_reduce(flat, op)

    def broadcast(self, flat: torch.Tensor, root: int = 0) -> Work:
        return self._fallback.broadcast(flat, root)

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> Work:
        return self._fallback.all_gather(out, part)

    def all_to_all(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        return self._fallback.all_to_all(out, flat)


def form_channel(rendezvous: Rendezvous, base: TorchDistTransport, hosts: Sequence[Sequence[int]]) -> Channel:
    """Connect this rank with those that own the same slice on the other hosts.

    All ranks of the group call it, and continue only if all succeed.
    """
    place, rank = rendezvous.place, base.rank
    home = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    index = list(hosts[home]).index(rank)
    gloo = {name: like for name, like in own_backends(base.users_group).items() if name == "gloo"}
    groups: list[dist.ProcessGroup] = []
    failed = "" if gloo else f"rank {rank} has no gloo backend in its group, which is needed to reach other hosts"
    if gloo and index < min(map(len, hosts)):
        stores = [PrefixStore(f"channel {index} {what}", place) for what in ("notes", "sums")]
        # On a thread: the constructor blocks until every rank is there.
        making = StoreCall(lambda _: [form_own_group(gloo, store, home, len(hosts)) for store in stores])

        def made_or_failed(call: StoreCall[None]) -> None:
            while not making.done() and not place.check(["failed"]) and call.pause(0.01):
                pass

        rendezvous.call(made_or_failed, what="the forming of the channels between hosts")
        try:
            groups = making.result() if making.wait(0) else []
        except RuntimeError as error:
            failed = f"rank {rank} could not connect to the other hosts: {error}"
    if failed:
        place.set("failed", failed)
    rendezvous.check("channels", failed)
    return Channel(groups, hosts)
