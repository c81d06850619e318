"""The store that a torch process group was formed with, and the watch over its ranks through it."""

import os

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.collectives.watch import StoreWatch


def watch_of(group: dist.ProcessGroup, *, sequence: str | None = None) -> StoreWatch:
    """A watch over the ranks of a torch process group, through the group's own store."""
    store = store_of(group)
    rank, size = group.rank(), group.size()
    if sequence is None and store is not None:
        # The n-th transport over a group on one rank matches the n-th on another.
        sequence = f"transport {store.add(f'paceline/transports/{rank}', 1)}"
    return StoreWatch(store, rank, size, sequence=sequence or "", store_host=_store_host(group, store))


def store_of(group: dist.ProcessGroup) -> Store | None:
    """The store that a group was formed with. None for a group that torch does not know."""
    entry = distributed_c10d._world.pg_map.get(group)
    return entry[1] if entry is not None else None


def _store_host(group: dist.ProcessGroup, store: Store | None) -> int | None:
    """The rank whose process answers for a TCPStore: global rank 0, unless a launcher's agent does."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not isinstance(store, TCPStore) or agents or 0 not in dist.get_process_group_ranks(group):
        return None
    return dist.get_group_rank(group, 0)
