"""The store that a torch process group was formed with, and the watch over its ranks through it."""

import os
import socket

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


def store_is_reachable(store: Store) -> bool:
    """Whether this process could connect to a TCPStore again: it may have moved to another network. No packet is
    sent, and nothing listens."""
    base = _base_of(store)
    if not isinstance(base, TCPStore):
        return True
    try:
        family, kind, _, _, place = socket.getaddrinfo(base.host, base.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
    except OSError:
        return False
    return True


def _base_of(store: Store | None) -> Store | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _store_host(group: dist.ProcessGroup, store: Store | None) -> int | None:
    """The rank whose process runs a TCPStore: global rank 0, unless a launcher's agent does."""
    base = _base_of(store)
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not isinstance(base, TCPStore) or agents or 0 not in dist.get_process_group_ranks(group):
        return None
    return dist.get_group_rank(group, 0)
