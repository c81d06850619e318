"""The start of a call that all ranks make: one that some ranks never come to ends soon, and says who they are."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from paceline.checkpoint.agree import Group, gather, gather_text, here, number_of
from paceline.collectives.checked import barrier
from paceline.collectives.peers import Board, Record, StoreCall
from paceline.collectives.torch_dist import store_of
from paceline.collectives.watch import Reports
from paceline.errors import CollectiveMismatch, PeerAbsent

logger = logging.getLogger("paceline")

SLICE_S = 2.0  # shorter than the time after which a barrier itself reports: here it is known what is waited for
REPORT_AFTER_S = 3.0
STUCK_S = 8.0  # a large broadcast may still be under way to some ranks, in one wait, when others have left it
STORE_S = 1.0
BARRIER = "the start of barrier()"  # what a rank is said to wait in that has come
RULE = "All ranks must make the same call in the same step; nothing was saved or loaded"


@dataclass(frozen=True)
class _Elsewhere:
    """A rank, the collective of the same group that it waits in instead, and since when by its own clock."""

    rank: int
    what: str
    at: str
    since: float


def arrive(call: str, group: Group, timeout: float | None) -> None:
    """Return when all ranks have come to `call`, given as text such as "Checkpointer.save(5)".

    Raises CollectiveMismatch when ranks came to different calls, and when one waits in another collective of the group
    instead, for longer than bytes need: that one needs this rank too, so neither would end. A rank that computes is
    waited for, and named in the log; after `timeout` seconds PeerAbsent is raised.
    """
    _wait_for_all(call, group, timeout)
    if len(set(gather([number_of(call)], group))) > 1:
        calls = gather_text(call, group)
        told = "; ".join(f"rank {rank} called {other}" for rank, other in enumerate(calls))
        odd = [rank for rank, other in enumerate(calls) if other != calls[0]]
        raise CollectiveMismatch(f"the ranks made different calls: {told}. {RULE}", ranks=odd)


def _wait_for_all(call: str, group: Group, timeout: float | None) -> None:
    """A barrier in slices. One that was given up is as if it had not been called, so it can be called again."""
    started, reports = time.monotonic(), Reports(REPORT_AFTER_S)
    rank = here(group)[0]
    since: dict[_Elsewhere, float] = {}
    absent: Sequence[int]
    while True:
        try:
            barrier(group=group, timeout=SLICE_S if timeout is None else min(SLICE_S, timeout))
        except CollectiveMismatch as error:
            raise CollectiveMismatch(f"{call} on rank {rank}: {error}. {RULE}", ranks=error.ranks) from error
        except PeerAbsent as error:
            absent = error.ranks
        else:
            return
        waited_s = time.monotonic() - started
        about = f"rank {rank} called {call} and has waited {waited_s:.1f} s"
        records = _records(group)
        since = {one: since.get(one, waited_s) for one in _elsewhere(records)}
        if stuck := [one for one, seen_s in since.items() if waited_s - seen_s >= STUCK_S]:
            told = "; ".join(f"rank {one.rank} waits in {one.what}{one.at}" for one in stuck)
            raise CollectiveMismatch(f"{about}, but {told}. {RULE}", ranks=[one.rank for one in stuck])
        absent = [other for other in absent if not _between_slices(records.get(other))] or absent
        names = ", ".join(f"rank {other}" for other in absent) or "an unknown rank"
        if timeout is not None and waited_s >= timeout:
            raise PeerAbsent(f"{about} for {names}, more than timeout={timeout:g} s. {RULE}", ranks=absent)
        if reports.due(waited_s):
            logger.warning("%s for %s", about, names)


def _records(group: Group) -> dict[int, Record]:
    """What the other ranks say about themselves, if the group's store tells."""
    group = group or dist.group.WORLD
    store = None if group is None else store_of(group)
    if group is None or store is None:
        return {}
    board = Board(store, group.rank(), group.size())
    asked = StoreCall(lambda _: board.exchange())
    try:
        return asked.result() if asked.wait(STORE_S) else {}
    except RuntimeError:  # the store is gone: the next slice finds out who took it along
        return {}


def _elsewhere(records: Mapping[int, Record]) -> list[_Elsewhere]:
    waits = [(rank, wait) for rank, record in records.items() for wait in record.waits]
    found = [_Elsewhere(rank, wait.what, wait.at, wait.since) for rank, wait in waits]
    return sorted((one for one in found if one.what != BARRIER), key=lambda one: one.rank)


def _between_slices(record: Record | None) -> bool:
    """Whether a rank that waits in nothing has probably come: it posts a wait only when that has lasted a moment."""
    return record is not None and not record.waits and record.last == BARRIER
