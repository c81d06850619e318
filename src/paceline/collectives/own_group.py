"""paceline's duplicate of a group: connections over the same ranks, separate from the user's collectives."""

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.collectives.store_gather import Rendezvous
from paceline.collectives.torch_store import store_is_reachable, store_of, watch_of
from paceline.collectives.watch import StoreWatch

logger = logging.getLogger("paceline")

# The torch backends that can be created here, and their kinds of device.
_KINDS = {"gloo": "cpu", "nccl": "cuda"}
# A device may be some steps behind its host; with a dead peer it never gets there, until `collectives.watcher` has
# aborted the communicators.
BEHIND_S = 10.0
# Read when a communicator's group is created. torch's reaction to a dead peer ends this process; and before it
# does that, or a group can be released, it waits for four times the timeout of a dump: a minute by default.
_OURS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "25"}


def duplicate(
    group: dist.ProcessGroup, devices: Collection[torch.device], timeout_s: float | None
) -> tuple[StoreWatch, Callable[[], dist.ProcessGroup]] | None:
    """Prepare a duplicate of `group` for the tensors of `devices`: the watch over its ranks, and a function that forms
    it when it is first needed. None if its backend cannot be duplicated.

    That function returns `group` itself if some rank cannot connect a second time. In both cases rank 0 logs a warning.
    """
    rank, size = group.rank(), group.size()
    store = store_of(group)
    backends = own_backends(group, {device.type for device in devices})
    if store is None or not backends:
        backend = backend_name(group, next(iter(devices), torch.device("cpu"))) or group.name()
        _warn_of_sharing(rank, f"has a backend that cannot be duplicated ({backend})")
        return None
    number = store.add(f"paceline/replicas/{rank}", 1)
    watch = watch_of(group, sequence=f"replica {number}")

    def form() -> dist.ProcessGroup:
        own_store = PrefixStore(f"paceline/replica {number}", store)
        # Checked first: a rank that cannot connect would leave the others waiting in gloo's constructor.
        rendezvous = Rendezvous(own_store, rank, size, watch, timeout_s)
        told = rendezvous.gather("able", "" if store_is_reachable(store) else "it cannot reach the store any more")
        if obstacles := [f"rank {peer}: {text}" for peer, text in enumerate(told) if text]:
            _warn_of_sharing(rank, f"could not be duplicated ({obstacles[0]})")
            return group
        # On a thread: gloo's constructor blocks until every rank is there.
        what = f"the forming of replica {number}'s own group"
        return rendezvous.call(lambda _: form_own_group(backends, own_store, rank, size), what=what)

    return watch, form


class Carrier:
    """The group that moves the bytes: the user's, or a duplicate of it, which is formed when it is first needed."""

    def __init__(self, users_group: dist.ProcessGroup, form: Callable[[], dist.ProcessGroup] | None) -> None:
        self.duplicates = form is not None
        self._users_group = users_group
        self._form = form
        self._own: dist.ProcessGroup | None = None

    @cached_property
    def group(self) -> dist.ProcessGroup:
        if self._form is None:
            return self._users_group
        formed = self._form()
        self._own = formed if formed is not self._users_group else None
        _carriers.add(self)
        return formed

    def leave(self, last: Sequence[Any]) -> None:
        """Release a group of its own; any other belongs to its creator. `last`: its newest works. Idempotent.

        gloo's connections end with the group. NCCL's communicators are aborted there too, with a warning of torch that
        they were not destroyed, and with any collective still in flight. So the device is waited for: after the release
        of a replica its results may still be used, which are ordered after collectives that have yet to run.
        """
        own, self._own = self._own, None
        backend = None if own is None else _nccl_of(own)
        if backend is None or torch.cuda.is_current_stream_capturing():
            return
        queued = torch.cuda.current_stream().record_event()
        until = time.monotonic() + BEHIND_S
        while not (queued.query() and all(work.is_completed() for work in last)) and time.monotonic() < until:
            time.sleep(0.001)
        backend.abort()

    def communicator_of(self, group: dist.ProcessGroup | None) -> Any | None:
        """NCCL's, if this is a duplicate of `group` that has one. `group` None: of any group."""
        of_it = self._own is not None and group in (None, self._users_group)
        return _nccl_of(self._own) if of_it and self._own is not None else None


_carriers: weakref.WeakSet[Carrier] = weakref.WeakSet()  # those that have formed a group


def abort_duplicates(group: dist.ProcessGroup) -> None:
    """Abort the collectives on a device in paceline's duplicates of `group`, whichever ranks they wait for. Their
    results are useless, and so are the duplicates. gloo's collectives cannot be aborted."""
    _abort([carrier.communicator_of(group) for carrier in list(_carriers)])


def abort_all() -> None:
    """The same in every group of this process, including the user's."""
    listed = [_nccl_of(group) for group in dist.distributed_c10d._world.pg_map]
    _abort([*(carrier.communicator_of(None) for carrier in list(_carriers)), *listed])


def _abort(communicators: Sequence[Any | None]) -> None:
    """All at once, each on its own thread: an abort first tells the kernels of its own communicator to return and then
    frees memory, which waits for the whole device. One by one, the first would wait forever for a kernel of the
    second."""
    found = {id(one): one for one in communicators if one is not None}
    threads = [threading.Thread(target=one.abort, name="paceline abort", daemon=True) for one in found.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The backend that moves tensors on `device`, if the group has one."""
    try:
        return str(group._get_backend(device).name())
    except (RuntimeError, NotImplementedError):
        return None


def _warn_of_sharing(rank: int, why: str) -> None:
    if rank == 0:
        logger.warning(
            "the process group %s, so gradients are reduced over the group itself: run no other collectives on it "
            "while a backward runs",
            why,
        )


def own_backends(group: dist.ProcessGroup, kinds: Collection[str] = ()) -> dict[str, Any]:
    """The backends of `group` that `form_own_group` can create again, by name. Empty if it has any other.

    `kinds` are the kinds of devices ("cpu", "cuda") whose tensors are moved: where one backend can move them all, the
    others are left out, since a host tensor can be sent through a device and a communicator costs memory there.
    """
    if type(group) is not dist.ProcessGroup or group not in dist.distributed_c10d._world.pg_map:
        return {}
    # "cpu:gloo,cuda:nccl"; one backend for all kinds of devices is listed once per kind
    listed = {pair.partition(":")[2] for pair in str(dist.get_backend_config(group)).split(",")}
    if not listed or not listed <= set(_KINDS):
        return {}
    needed = {name for name in listed if _KINDS[name] in kinds} or listed
    return {name: group._get_backend(torch.device(_KINDS[name])) for name in sorted(needed)}


def form_own_group(
    backends: Mapping[str, Any], store: Store, rank: int, size: int, *, ranks: Sequence[int] = ()
) -> dist.ProcessGroup:
    """A group that torch does not list, with backends like those given. All ranks call it. Blocks until they have.

    `ranks`: the members, by their numbers in the given backends' groups; all by default. The others call it as well,
    for groups of their own: a communicator is split by all ranks at once.
    """
    own = dist.ProcessGroup(store, rank, size)
    for name, like in backends.items():
        if name == "gloo":
            made: Any = dist.ProcessGroupGloo(store, rank, size, _gloo_options(like))
            kind = dist.ProcessGroup.BackendType.GLOO
        else:
            with _errors_are_ours():
                made = dist.ProcessGroupNCCL(store, rank, size, _nccl_options(like, ranks or range(size)))
            kind = dist.ProcessGroup.BackendType.NCCL
        own._register_backend(torch.device(_KINDS[name]), kind, made)
        if name == "gloo" and len(backends) == 1:
            own._register_backend(torch.device("cuda"), kind, made)  # gloo moves device memory too
    return own


@contextmanager
def _errors_are_ours() -> Iterator[None]:
    """A communicator created inside does not end the process when a peer is lost, as torch's watchdog thread does
    by default, at once and without naming it: `collectives.watcher` names the rank, and the caller raises."""
    before = {name: os.environ.get(name) for name in _OURS}
    os.environ.update(_OURS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _gloo_options(like: Any) -> Any:
    """Options for a group that listens and connects where `like` does, through the same devices: a new device
    would listen at the address of this machine's name."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = like.options._timeout
    options._devices = like.options._devices
    return options


def _nccl_options(like: Any, ranks: Sequence[int]) -> Any:
    """Options for a communicator of some ranks that is split off `like`'s if that exists: it then shares its
    connections."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = like.options._timeout
    if hasattr(options, "split_from"):
        options.split_from = like
        options.split_color = 1 + ranks[0]  # the same for all members of one group
        options.global_ranks_in_group = list(ranks)
    return options


def _nccl_of(own: dist.ProcessGroup) -> Any | None:
    device = torch.device("cuda")
    return own._get_backend(device) if backend_name(own, device) == "nccl" else None
