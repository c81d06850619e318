"""A transport over some of the ranks of a group: those that shard parameters among them, or those that hold one shard.

Errors name ranks by their numbers in the whole group, which are the ones that users know.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from paceline.collectives.group import Group
from paceline.collectives.local import LocalTransport
from paceline.collectives.own_group import form_own_group, own_backends
from paceline.collectives.protocols import Transport
from paceline.collectives.shm.connect import PeerInfo, PeerListener, check_share_host, connect
from paceline.collectives.shm.transport import ShmTransport
from paceline.collectives.store_gather import NoSharedMemory, Rendezvous
from paceline.collectives.torch_dist import TorchDistTransport
from paceline.collectives.torch_store import store_of, watch_of
from paceline.collectives.watch import StoreWatch
from paceline.errors import UsageError


class Subgroup(Group):
    """A group of some of the ranks of a larger one."""

    def __init__(self, transport: Transport, timeout_s: float | None, ranks: Sequence[int]) -> None:
        """`ranks`: their numbers in the larger one."""
        super().__init__(transport, timeout_s)
        self.ranks = ranks


def ranks_of(group: Group) -> Sequence[int]:
    """The numbers of the ranks of a group, in the user's numbering."""
    return group.ranks if isinstance(group, Subgroup) else range(group.size)


class SubgroupTransport(TorchDistTransport):
    """torch's collectives over some of the ranks of a process group."""

    def __init__(
        self,
        base: TorchDistTransport,
        ranks: Sequence[int],
        watch: StoreWatch,
        form: Callable[[], dist.ProcessGroup],
        devices: Collection[torch.device],
        again: Callable[[float | None], Transport],
    ) -> None:
        super().__init__(base.users_group, watch=watch, own_group=form, devices=devices)
        self.rank, self.size = ranks.index(base.rank), len(ranks)
        self._again = again

    def dup(self, timeout_s: float | None = None, devices: Collection[torch.device] = ()) -> Transport:  # type: ignore[override]
        return self._again(timeout_s)


def split(
    base: TorchDistTransport,
    parts: Sequence[Sequence[int]],
    wanted: str,
    devices: Collection[torch.device],
    timeout_s: float | None,
) -> Transport:
    """A transport over the one of `parts` that contains this rank. All ranks of `base` call it, with the same parts.

    Tensors on the CPU go through shared memory where the ranks of every part can share it, unless "torch" is `wanted`.
    """
    store = store_of(base.users_group)
    backends = own_backends(base.users_group, {device.type for device in devices})
    if store is None or not backends:
        raise UsageError(
            "shard= needs a process group of gloo or NCCL that torch.distributed knows, to form groups of some of its "
            "ranks; leave shard= out, or pass another process_group"
        )
    ranks = next(part for part in parts if base.rank in part)
    number = store.add(f"paceline/subgroups/{base.rank}", 1)
    place = PrefixStore(f"paceline/subgroup {number} of {ranks[0]}", store)
    watch = watch_of(base.users_group, sequence=f"subgroup {number}")

    def form() -> dist.ProcessGroup:
        meeting = Rendezvous(place, ranks.index(base.rank), len(ranks), watch, timeout_s)
        what = f"the forming of a group of {len(ranks)} ranks"
        return meeting.call(
            lambda _: form_own_group(backends, place, meeting.rank, meeting.size, ranks=ranks), what=what
        )

    def again(timeout_s: float | None) -> Transport:
        return split(base, parts, wanted, devices, timeout_s)

    flat = SubgroupTransport(base, ranks, watch, form, devices, again)
    if wanted == "torch" or any(device.type != "cpu" for device in devices):
        return flat.connect()
    everyone = Rendezvous.next(store, base.rank, base.size, watch, timeout_s)
    with PeerListener(base.rank, wanted) as listener:
        told = everyone.gather("peer info", listener.own.encode())
        peers = [PeerInfo.decode(text, rank) for rank, text in enumerate(told)]
        try:
            for part in parts:
                check_share_host([peers[rank] for rank in part])
            mesh = connect(everyone, listener, [peers[rank] for rank in ranks])
        except NoSharedMemory:  # logged already, when the transport of all ranks was chosen
            return flat.connect()
    return ShmTransport(mesh, watch=watch, fallback=flat, again=again)


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """The two groups of a rank if shards span only some of the ranks."""

    shard: Group  # the ranks that hold all shards between them
    twins: Group  # the ranks that hold the same shard as this rank, in the other shard groups

    @classmethod
    def of(
        cls,
        base: TorchDistTransport,
        size: int,
        wanted: str,
        devices: Collection[torch.device],
        timeout_s: float | None,
    ) -> "ShardGroups":
        """Shards over `size` consecutive ranks. All ranks of `base` call it."""
        everyone = range(base.size)
        made = []
        for parts in (
            [everyone[at : at + size] for at in everyone[::size]],
            [everyone[at::size] for at in range(size)],
        ):
            mine = next(part for part in parts if base.rank in part)
            alone = len(mine) == 1  # in all parts, as they are of one size
            found = LocalTransport() if alone else split(base, parts, wanted, devices, timeout_s)
            made.append(Subgroup(found, timeout_s, mine))
        return cls(*made)

    def close(self) -> None:
        """Release the transports. Idempotent."""
        self.shard.close()
        self.twins.close()
