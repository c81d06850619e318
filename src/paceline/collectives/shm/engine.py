"""The collectives in flight of one rank: begun in order, done in order, complete in order."""

import struct
import threading
import time
from collections import deque

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function

from paceline.collectives.shm import plan, record
from paceline.collectives.shm.arenas import NOWHERE, Arenas
from paceline.collectives.shm.crossing import DIFFERENT, Between
from paceline.collectives.shm.link import Farewell, Link
from paceline.collectives.shm.mesh import Heard, Mesh
from paceline.collectives.shm.operation import Operation
from paceline.collectives.shm.plan import Scratch, Sources, Summing
from paceline.errors import CollectiveError, CollectiveMismatch, PeerAbsent

PLANS_KEPT = 512
CROSSING_POLL_S = 0.0005
_CALL = struct.Struct("=4q")


class Engine:
    """Moves the collectives of one rank forward, on the thread that asks.

    The stages of a collective
    --------------------------
    queued → begun (its record is published) → done (this rank has done its part) → complete (all have). Every rank
    takes every collective through them in the order in which it was started, so two counters per rank say all: the
    n-th has been begun by all when the least `begun` is above n, and is complete when the least `finished` is. A rank
    does its part only after all have begun, so nobody's memory is touched before its owner has let go of it. A record
    may be overwritten, and memory used again, once the collective is complete: all have then read it.
    """

    def __init__(self, mesh: Mesh, arenas: Arenas, between: Between | None, owners: int, divide_by: int) -> None:
        self.mesh = mesh
        self._arenas = arenas
        self._between = between
        self._owners = owners
        self._divide_by = divide_by
        self._queued: deque[Operation] = deque()
        self._begun: deque[Operation] = deque()
        self._crossing: deque[Operation] = deque()
        self._done: deque[Operation] = deque()
        self._started = 0
        self._completed = 0
        self._plans: dict[bytes, Summing | Sources] = {}
        self._scratch = Scratch()
        self._lock = threading.Lock()
        self._given_up: str | None = None
        self._failure: RuntimeError | None = None

    @property
    def flying(self) -> bool:
        return self._completed < self._started

    def start(self, operation: Operation) -> None:
        with self._lock:
            self._check_usable()
            operation.number = self._started
            try:
                self._started += 1
                self._queued.append(operation)
                self._advance()
            except BaseException as error:
                self.give_up(f"{type(error).__name__} when it started {operation}")
                raise

    def progress(self) -> None:
        """Do what can be done now. Never blocks, nor does it wait for another thread that is at it already."""
        if (self._completed < self._started or self._arenas.freed) and not self._lock.locked():
            with self._lock:
                if self._given_up is None and not self.mesh.closed and self.mesh.is_mine():
                    try:
                        self._advance()
                    except RuntimeError as error:
                        self._failure = error  # for who waits: the wait says what it means

    def wait(self, operation: Operation, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        heard: Heard = []
        try:
            while (awaited := self._step(operation, heard)) is not None:
                left_s = max(0.0, deadline - time.monotonic())
                heard = self.mesh.sleep(awaited, min(left_s, CROSSING_POLL_S) if self._crossing else left_s)
                if not heard and left_s == 0.0:
                    return False
        except BaseException as error:
            self.give_up(f"{type(error).__name__} while it waited for {operation}")
            raise
        if operation.error is not None:
            raise operation.error
        return True

    def _step(self, operation: Operation, heard: Heard) -> list[Link] | None:
        """Get on with everything. None when `operation` is over, else the peers to wait for."""
        with self._lock:
            if operation.over:
                return None
            if self._failure is not None:
                raise self._failure
            self._check_usable()
            if heard:
                self.mesh.heed(heard)
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
            self.give_up(f"{type(error).__name__} in the middle of a collective: {error}")
            raise

    def _publish(self) -> None:
        arenas, mesh = self._arenas, self.mesh
        while arenas.freed:
            number = arenas.freed.popleft()
            self._forget(mesh.place, number)
            mesh.take_back(number)
        while self._queued and self._queued[0].number < self._completed + record.RING:
            operation = self._queued[0]
            if operation.arena != NOWHERE:
                arena = arenas.arena(operation.arena)
                if arena.descriptor is not None:
                    mesh.share(arena)
            if not mesh.flush():
                return
            self._queued.popleft()
            mesh.begin(operation.word, operation.numel, operation.arena, operation.offset)
            self._begun.append(operation)
        mesh.flush()

    def _do(self, operation: Operation) -> None:
        calls = self.mesh.calls(operation.number)
        self._forget_freed()
        key = b"".join(calls)
        prepared = self._plans.get(key)
        if prepared is None:
            operation.error = _mismatch(calls, self.mesh)
            prepared = [] if operation.error else self._prepare(calls, operation)
            if operation.error is None:
                self._keep_plan(key, prepared)
        if self._between is not None:  # before the sum, which takes longer than the way to the other hosts
            word = DIFFERENT if operation.error else operation.word
            operation.crossing = self._between.announce(word, operation.numel)
        if operation.error is None:
            if _profiler_enabled():
                with record_function(f"shm:{record.kind_of(operation.word)}"):
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
        elif self._between is None:
            prepared.run()
        elif operation.crossing is not None:
            prepared.sum()
            operation.crossing.send(prepared.result, record.op_of(operation.word))
            operation.spreads = prepared

    def _cross(self) -> None:
        """Let what is on its way between hosts depart and arrive, in order.

        If hosts differ this is the end of the transport, on all ranks of all hosts: those that own no slice learn it
        from those that do, as they leave.
        """
        for operation in self._crossing:
            try:
                if operation.crossing is not None and not operation.crossing.departed():
                    break
            except CollectiveMismatch as error:
                told = operation.error or error
                self.give_up(str(told), told.ranks, mismatch=True)
                raise told from None
        while self._crossing and self._arrived(self._crossing[0]):
            self._finish(self._crossing.popleft())

    def _arrived(self, operation: Operation) -> bool:
        if operation.crossing is not None and not operation.crossing.arrived():
            return False
        if operation.spreads is not None:
            operation.spreads.spread()
        return True

    def _finish(self, operation: Operation) -> None:
        self.mesh.finish()
        self._done.append(operation)
        operation.over = operation.early

    def _complete(self, operation: Operation) -> None:
        if operation.after is not None:
            operation.after()
        operation.keep = operation.after = operation.read = operation.crossing = operation.spreads = None
        self._completed += 1
        operation.over = True

    # Plans ---------------------------------------------------------------------------------------------------------

    def _prepare(self, calls: list[bytes], operation: Operation) -> Summing | Sources:
        mesh, word, numel = self.mesh, operation.word, operation.numel
        kind, dtype = word & 0xFF, record.dtype_of(word)
        memories = []
        for place, call in enumerate(calls):
            _, _, arena, offset = _CALL.unpack(call)
            if arena == NOWHERE:
                memories.append((torch.empty(0, dtype=torch.uint8, device="cpu"), 0))
            elif place == mesh.place:
                memories.append((self._arenas.arena(arena).bytes, offset))
            else:
                memories.append((mesh.memory_of(place, arena), offset))
        if kind == record.EXCHANGE:
            return plan.parts_of(memories, mesh.place, numel // mesh.size, dtype)
        if kind == record.BROADCAST:
            memories = [memories[word >> 32]]
        views = plan.parts_of(memories, 0, numel, dtype)
        if kind != record.ALL_REDUCE:
            return views
        bounds = plan.cut(numel, dtype.itemsize, self._owners)
        own = bounds[mesh.place] if mesh.place < self._owners else (0, 0)
        return Summing(views, record.op_of(word), own, self._divide_by, self._scratch)

    def _keep_plan(self, key: bytes, prepared: Summing | Sources) -> None:
        if len(self._plans) >= PLANS_KEPT:
            del self._plans[next(iter(self._plans))]
        self._plans[key] = prepared

    def _forget_freed(self) -> None:
        for index, link in enumerate(self.mesh.links):
            while link.freed:
                self._forget(index if index < self.mesh.place else index + 1, link.freed.pop())

    def _forget(self, place: int, arena: int) -> None:
        """Drop the plans that look at an arena, so that it can be unmapped. Its number is never used again."""
        at = place * _CALL.size
        for key in list(self._plans):
            if _CALL.unpack_from(key, at)[2] == arena:
                del self._plans[key]

    # Peers that are not there --------------------------------------------------------------------------------------

    def _awaited(self, operation: Operation) -> list[Link]:
        """One peer of each kind that this rank waits for; raises if one of them is gone.

        One is enough: whoever is waited for last ends the wait, and the others are seen then. To wake up for each
        would cost more than the reduction where there are more ranks than cores.
        """
        mesh = self.mesh
        lacking = [link for link in mesh.links if link.finished <= operation.number]
        for link in lacking:
            if link.gone is not None:
                self._raise_gone(operation, link, link.gone)
        awaited = lacking[:1]
        if self._begun:
            number = self._begun[0].number
            awaited += [link for link in mesh.links if link.begun <= number and link not in awaited][:1]
        return awaited

    def _raise_gone(self, operation: Operation, link: Link, farewell: Farewell) -> None:
        if farewell.mismatch:
            self.give_up(farewell.why, farewell.ranks, mismatch=True)
            raise CollectiveMismatch(farewell.why, ranks=farewell.ranks)
        if farewell.ranks:
            self.give_up(farewell.why, farewell.ranks)
            raise PeerAbsent(f"rank {link.rank} gave up: {farewell.why}", ranks=farewell.ranks)
        # The words "connection closed" lead the watch to look for who died.
        text = f"connection closed by rank {link.rank}, which {operation} needs: {farewell.why}"
        self.give_up(text)
        raise RuntimeError(text)

    def give_up(self, why: str, ranks: tuple[int, ...] = (), *, mismatch: bool = False) -> None:
        """Refuse all further use if a collective is in flight, and tell the peers.

        Why a transport with an abandoned collective is not used again
        --------------------------------------------------------------
        The others may come to the abandoned collective at any time later: they would then read this rank's memory, with
        whatever it holds by then, and write to it. The owner of that memory takes new memory; the old one stays mapped
        where it is still written to and harms nobody.
        """
        if self._given_up is None and self.flying:
            self._given_up = why
            self.mesh.leave(Farewell(why, ranks, mismatch))

    def close(self) -> None:
        with self._lock:
            self.give_up("it closed its transport")
            self._plans.clear()
            for stage in (self._queued, self._begun, self._crossing, self._done):
                stage.clear()
            self.mesh.close()

    def _check_usable(self) -> None:
        mesh = self.mesh
        if not mesh.is_mine():
            raise CollectiveError("this process was forked off a rank and has no seat in its group; form a new group")
        if mesh.closed:
            raise CollectiveError("the shared-memory transport of this rank is closed; make a new replica or transport")
        if self._given_up is not None:
            raise CollectiveError(
                f"an earlier collective of this transport was given up ({self._given_up}), and other ranks may still "
                f"write to its memory; make a new replica or transport, on all ranks"
            )


def _mismatch(calls: list[bytes], mesh: Mesh) -> CollectiveMismatch | None:
    said = [_CALL.unpack(call)[:2] for call in calls]
    if len(set(said)) == 1:
        return None
    told = "; ".join(f"rank {rank} called {record.text_of(*call)}" for rank, call in zip(mesh.ranks, said, strict=True))
    return CollectiveMismatch(f"{told}. Every rank must issue the same collectives in the same order", ranks=mesh.ranks)
