"""The world of a member of an elastic job: its generation, and the process group that is formed for each."""

import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from paceline.collectives.peers import FOREIGN, Identity
from paceline.collectives.store_call import StoreCall
from paceline.errors import IllegalMove, Malformed, PeerLost, UsageError
from paceline.member import Member
from paceline.member_messages import LOOPBACK, Generation, MemberStore
from paceline.progress import own_progress
from paceline.rank_report import STORE_HOST_NAME
from paceline.start.bound_store import host_store
from paceline.start.forming import default_backend, form_group, leave_group
from paceline.start.rendezvous import STORE_TIMEOUT
from paceline.tcp_connections import ports_of, sever_connections
from paceline.world import World
from paceline.world.environment import Variables

SLICE_S = 0.05
MEET_S = 30.0  # for the members of a generation to reach its store; the death of one is known at once
CONNECT_S = 10.0  # gloo connects in one call, which cannot be interrupted


class ElasticWorld(World):
    """Rank and size follow the generation. Before the first generation they are undefined."""

    def __init__(self, device_name: str = "") -> None:
        variables = Variables(os.environ)
        settings: dict[str, Any] = {
            "local_rank": variables.integer("LOCAL_RANK", 0),
            "local_size": variables.integer("LOCAL_WORLD_SIZE", 1),
            "node_rank": 0,
            "master_addr": "",
            "master_port": 0,
            "source": "the elastic job's generation",
            "device_name": device_name,
        }
        for name, value in settings.items():
            object.__setattr__(self, name, value)

    @property
    def rank(self) -> int:
        check_formed("rank")
        return dist.get_rank()

    @property
    def size(self) -> int:
        check_formed("size")
        return dist.get_world_size()

    def __repr__(self) -> str:
        formed = f"rank={self.rank}, size={self.size}" if dist.is_initialized() else "no generation yet"
        return f"ElasticWorld({formed}, local_rank={self.local_rank}, device_name={self.device_name!r})"

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def check_formed(what: str) -> None:
    """Raise IllegalMove before the first generation."""
    if not dist.is_initialized():
        raise IllegalMove(
            f"the {what} of a member of an elastic job is known once paceline.Elastic(model=..., optimizer=..., ...) "
            f"has been created: create it first"
        )


def elastic_world(device: torch.device | None, **given: object) -> World:
    """What `init` returns in an elastic job. It forms no group: `Elastic` does that, for each generation."""
    if named := [name for name, value in given.items() if value is not None]:
        raise UsageError(
            f"init({named[0]}=...) cannot be used in an elastic job, whose world changes: leave it out"
            + (", and pass it to paceline.Elastic" if named[0] == "backend" else "")
        )
    world = ElasticWorld("" if device is None else str(device))
    object.__setattr__(world, "device_name", str(world.device))
    return world


def form_generation(
    member: Member, generation: Generation, backend: str | None, device: torch.device
) -> tuple[Identity, ...]:
    """Form the default group of a generation; the previous one has been left. Returns the processes of the others.
    Raises PeerLost when a member leaves meanwhile."""
    rank, size = generation.rank_of(member.id), generation.size
    store, others = (HashStore(), ()) if size == 1 else _Meeting(member, generation).meet()
    try:
        form_group(store, rank, size, backend or default_backend(device), device, CONNECT_S)
    except (RuntimeError, ValueError) as error:
        raise PeerLost(
            f"member {member.id}: the group of generation {generation.number} could not connect within {CONNECT_S:g} "
            f"s: {error}"
        ) from error
    own_progress().note_end(lambda: not dist.is_initialized())
    return others


def leave_generation(others: Iterable[Identity]) -> None:
    """Leave the default group, which may be broken. `others`: the processes that were in it. Remaining connections to
    them are severed, so that nothing waits for a rank that will not come, and gloo frees its memory."""
    here = Identity.own().host
    elsewhere = {other.address for other in others if other.host != here and other.address}
    ports = ports_of(other.pid for other in others if other.host == here and other.state() != "dead")
    sever_connections(ports, elsewhere)
    leave_group()


class _Meeting:
    """The rendezvous of a generation at one store, which its first member runs."""

    def __init__(self, member: Member, generation: Generation) -> None:
        self._member = member
        self._generation = generation
        self._deadline = time.monotonic() + MEET_S

    def meet(self) -> tuple[Store, tuple[Identity, ...]]:
        """The store, once all members have reached it, and the processes of the others. Without this wait gloo would
        wait in its constructor for a member that has died."""
        generation, rank = self._generation, self._generation.rank_of(self._member.id)
        store = self._host() if rank == 0 else self._reach()
        # Its port may have belonged to an older store: a late member must not write into this generation.
        own = PrefixStore(f"generation {generation.number}", store)
        arrived = PrefixStore("arrived", own)
        self._call(lambda: arrived.set(str(rank), Identity.own().encode()))
        keys = [str(other) for other in range(generation.size)]
        while not self._call(lambda: arrived.check(keys)):
            time.sleep(0.002)
            self._check("reached its store")
        told = self._call(lambda: arrived.multi_get([key for key in keys if key != str(rank)]))
        store.set_timeout(STORE_TIMEOUT)
        try:
            return PrefixStore("group", own), tuple(map(Identity.decode, told))
        except Malformed as error:
            raise PeerLost(f"generation {generation.number} does not form: {error}; {FOREIGN}") from error

    def _host(self) -> Store:
        # Loopback, unless the launcher has placed members on other machines.
        host = os.environ.get(STORE_HOST_NAME, LOOPBACK)
        store = host_store(host, 0, timedelta(seconds=CONNECT_S))
        self._member.send(MemberStore(self._generation.number, store.port, host))
        return store

    def _reach(self) -> Store:
        host, port = self._member.await_store(self._generation.number)
        connect_s = timedelta(seconds=CONNECT_S)
        found: Store = self._call(lambda: TCPStore(host, port, timeout=connect_s, wait_for_workers=False))
        return found

    def _call(self, call: Callable[[], Any]) -> Any:
        """Call on a thread: a store whose host has just died blocks its caller."""
        running: StoreCall[Any] = StoreCall(lambda _: call())
        try:
            while not running.wait(SLICE_S):
                self._check("answered from its store")
            return running.result()
        except (RuntimeError, ValueError) as error:
            if isinstance(error, PeerLost):
                raise
            raise PeerLost(
                f"member {self._member.id}: the store of generation {self._generation.number} has ended: {error}"
            ) from error

    def _check(self, what: str) -> None:
        number = self._generation.number
        if left := self._member.ended(number):
            who = "; ".join(f"member {one.member} {one.reason}" for one in left)
            raise PeerLost(f"generation {number} ended before it was formed: {who}")
        if time.monotonic() > self._deadline:
            raise PeerLost(
                f"generation {number}: not all of its {self._generation.size} members {what} within {MEET_S:g} s"
            )
