"""The collectives in flight of one rank: begun in order, done in order, complete in order."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

from paceline.collectives.shm.arenas import NOWHERE, Arena, Arenas
from paceline.collectives.shm.codes import CodedCall
from paceline.collectives.shm.crossing import Channel, HostCrossing
from paceline.collectives.shm.mesh import RING, Events, Mesh, PeerLink
from paceline.collectives.shm.notices import PeerExit
from paceline.collectives.shm.prepare import Preparation, Sources
from paceline.collectives.shm.summing import Summing
from paceline.errors import CollectiveError, CollectiveMismatch, PeerAbsent

CROSSING_POLL_S = 0.0005


@dataclass(slots=True, eq=False)
class Operation:
    """One collective of this rank, from its start to its completion."""

    call: CodedCall
    arena: Arena | None  # where the others find the data, and at which byte
    offset: int
    keep: object  # objects that must stay alive until it is complete
    read: Callable[[Sources], None] | None = None  # copies out of the others' memory; an all_reduce is summed instead
    after: Callable[[], None] | None = None  # runs when all ranks have finished
    # The others read no memory of the caller, so for the caller it is complete when this rank has read.
    early: bool = False
    number: int = -1
    crossing: HostCrossing | None = None  # on its way between hosts
    error: CollectiveMismatch | None = None
    over: bool = False

    def __str__(self) -> str:
        return str(self.call)


class Engine:
    """Moves the collectives of one rank forward, on the calling thread.

    The stages of a collective
    --------------------------
    queued → begun (its record is published) → done (this rank has done its part) → complete (all have). Every rank
    takes every collective through them in the order in which it was started, so two counters per rank suffice: the
    n-th has been begun by all when the least `begun` is above n, and is complete when the least `finished` is. A rank
    does its part only after all have begun, so no memory is touched before its owner has released it. A record may be
    overwritten, and memory used again, once the collective is complete: all have then read it.
    """

    def __init__(self, mesh: Mesh, arenas: Arenas, channel: Channel | None, owners: int, divide_by: int) -> None:
        self.mesh = mesh
        self._arenas = arenas
        self._channel = channel
        self._preparation = Preparation(mesh, arenas, owners, divide_by)
        self._known = self._preparation.known
        self._queued: deque[Operation] = deque()
        self._begun: deque[Operation] = deque()
        self._crossing: deque[Operation] = deque()
        self._done: deque[Operation] = deque()
        self._started = 0
        self._completed = 0
        self._lock = threading.Lock()
        self._poisoned: str | None = None
        self._failure: RuntimeError | None = None

    def start(self, operation: Operation) -> None:
        with self._lock:
            self._check_usable()
            operation.number = self._started
            try:
                self._started += 1
                self._queued.append(operation)
                self._advance()
            except BaseException as error:
                self.poison(f"{type(error).__name__} when it started {operation}")
                raise

    def progress(self) -> None:
        """Do all possible work. Never blocks, not even for another thread that is already doing it."""
        if (self._completed < self._started or self._arenas.freed) and not self._lock.locked():
            with self._lock:
                if self._poisoned is None and not self.mesh.closed and self.mesh.is_mine():
                    try:
                        self._advance()
                    except RuntimeError as error:
                        self._failure = error  # raised in the wait, where it can be explained

    def wait(self, operation: Operation, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        events: Events = []
        try:
            while (awaited := self._step(operation, events)) is not None:
                left_s = max(0.0, deadline - time.monotonic())
                events = self.mesh.sleep(awaited, min(left_s, CROSSING_POLL_S) if self._crossing else left_s)
                if not events and left_s == 0.0:
                    return False
        except BaseException as error:
            self.poison(f"{type(error).__name__} while it waited for {operation}")
            raise
        if operation.error is not None:
            # A new error for each raise: the engine outlives its replica, which the traceback would keep.
            raise CollectiveMismatch(*operation.error.args, ranks=operation.error.ranks)
        return True

    def _step(self, operation: Operation, events: Events) -> list[PeerLink] | None:
        """Advance everything. None when `operation` is over, else the peers to wait for."""
        with self._lock:
            if operation.over:
                return None
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            self._check_usable()
            if events:
                self.mesh.handle(events)
                self._forget_freed()
            self._advance()
            return None if operation.over else self._awaited(operation)

    # One step after the other --------------------------------------------------------------------------------------

    def _advance(self) -> None:
        try:
            self._publish()
            self.mesh.look()
            while self._begun and self._begun[0].number < self.mesh.begun:
                self._do(self._begun.popleft())
            self._cross()
            while self._done and self._done[0].number < self.mesh.finished:
                self._complete(self._done.popleft())
        except BaseException as error:
            # Not even an interrupt may leave a collective half done and the transport in use.
            self.poison(f"{type(error).__name__} in the middle of a collective: {error}")
            raise

    def _publish(self) -> None:
        arenas, mesh = self._arenas, self.mesh
        while arenas.freed:
            number = arenas.freed.popleft()
            self._preparation.forget(mesh.place, number)
            mesh.take_back(number)
        while self._queued and self._queued[0].number < self._completed + RING:
            operation = self._queued[0]
            arena = operation.arena
            if arena is not None and arena.descriptor is not None:
                mesh.share(arena)
            if not mesh.flush():
                return
            self._queued.popleft()
            mesh.begin(*operation.call, NOWHERE if arena is None else arena.number, operation.offset)
            self._begun.append(operation)
        mesh.flush()

    def _do(self, operation: Operation) -> None:
        calls = self.mesh.calls(operation.number)
        self._forget_freed()
        key = b"".join(calls)
        prepared: Summing | Sources | CollectiveMismatch | None = self._known.get(key)
        if prepared is None:
            prepared = self._preparation.prepare(calls, key)
        if isinstance(prepared, CollectiveMismatch):
            operation.error = prepared
        if self._channel is not None:  # before the sum, which takes longer than the way to the other hosts
            operation.crossing = self._channel.announce(operation.call, operation.error)
        if not isinstance(prepared, CollectiveMismatch):
            if _profiler_enabled():
                with record_function(f"shm:{operation.call.kind_name}"):
                    self._carry_out(operation, prepared)
            else:
                self._carry_out(operation, prepared)
        if operation.crossing is None and not self._crossing:
            self._finish(operation)
        else:
            self._crossing.append(operation)

    def _carry_out(self, operation: Operation, prepared: Summing | Sources) -> None:
        if isinstance(prepared, list):
            assert operation.read is not None
            operation.read(prepared)
        elif self._channel is None:
            prepared.run()
        elif operation.crossing is not None:
            operation.crossing.sum(prepared)

    def _cross(self) -> None:
        """Send and receive the slices between hosts, in order.

        If hosts differ this is the end of the transport, on all ranks of all hosts: those that own no slice learn it
        from those that do, as they leave.
        """
        try:
            for operation in self._crossing:
                if operation.crossing is not None and not operation.crossing.departed():
                    break
        except CollectiveMismatch as error:
            self.poison(str(error), error.ranks, mismatch=True)
            raise
        while self._crossing and ((crossing := self._crossing[0].crossing) is None or crossing.arrived()):
            self._finish(self._crossing.popleft())

    def _finish(self, operation: Operation) -> None:
        self.mesh.finish()
        self._done.append(operation)
        if operation.early:
            operation.keep = operation.read = operation.crossing = None  # memory of the caller, who may free it now
            operation.over = True

    def _complete(self, operation: Operation) -> None:
        if operation.after is not None:
            operation.after()
        operation.keep = operation.after = operation.read = operation.crossing = None
        self._completed += 1
        operation.over = True

    def _forget_freed(self) -> None:
        for index, link in enumerate(self.mesh.links):
            freed = link.notices.freed
            while freed:
                self._preparation.forget(index if index < self.mesh.place else index + 1, freed.pop())

    # Absent peers ----------------------------------------------------------------------------------------------

    def _awaited(self, operation: Operation) -> list[PeerLink]:
        """One peer of each kind that this rank waits for; raises if one of them has left.

        One is enough: the last awaited peer ends the wait, and the others are noticed then. Waking up for each
        would cost more than the reduction if there are more ranks than cores.
        """
        mesh = self.mesh
        lacking = [link for link in mesh.links if link.finished <= operation.number]
        for link in lacking:
            if link.notices.gone is not None:
                self._raise_gone(operation, link, link.notices.gone)
        awaited = lacking[:1]
        if self._begun:
            number = self._begun[0].number
            awaited += [link for link in mesh.links if link.begun <= number and link not in awaited][:1]
        return awaited

    def _raise_gone(self, operation: Operation, link: PeerLink, reason: PeerExit) -> None:
        if reason.mismatch:
            self.poison(reason.why, reason.ranks, mismatch=True)
            raise CollectiveMismatch(reason.why, ranks=reason.ranks)
        if reason.ranks:
            self.poison(reason.why, reason.ranks)
            raise PeerAbsent(f"rank {link.rank} stopped waiting: {reason.why}", ranks=reason.ranks)
        # The words "connection closed" make the watch look for a dead rank.
        text = f"connection closed by rank {link.rank}, which {operation} needs: {reason.why}"
        self.poison(text)
        raise RuntimeError(text)

    def poison(self, why: str, ranks: tuple[int, ...] = (), *, mismatch: bool = False) -> None:
        """Refuse all further use if a collective is in flight, and tell the peers why.

        Why a transport with an abandoned collective is not used again
        --------------------------------------------------------------
        The others may reach the abandoned collective at any later time: they would then read this rank's memory, with
        whatever it holds by then, and write to it. The owner of that memory takes new memory; the old one stays mapped
        where it is still written to and harms nobody.
        """
        if self._poisoned is None and self._completed < self._started:
            self._poisoned = why
            self.mesh.leave(PeerExit(why, ranks, mismatch))

    def close(self) -> None:
        with self._lock:
            self.poison("it closed its transport")
            self._known.clear()
            for stage in (self._queued, self._begun, self._crossing, self._done):
                stage.clear()
            self.mesh.close()

    def _check_usable(self) -> None:
        mesh = self.mesh
        if not mesh.is_mine():
            raise CollectiveError(
                "this process was forked from a rank and is not a member of its group; form a new group"
            )
        if mesh.closed:
            raise CollectiveError("the shared-memory transport of this rank is closed; make a new replica or transport")
        if self._poisoned is not None:
            raise CollectiveError(
                f"an earlier collective of this transport was abandoned ({self._poisoned}), and other ranks may still "
                f"write to its memory; make a new replica or transport on all ranks"
            )
