"""The ranks that work together now, the transport between them, and the single place where a rank waits for others."""

import threading
import time
from _thread import get_ident
from collections import deque
from collections.abc import Callable

import torch

from paceline.collectives.protocols import Transport, Watch, Work
from paceline.errors import CollectiveError, PacelineError, PeerAbsent, PeerLost
from paceline.progress import Phase, own_progress

# Long enough to cost nothing, short enough that Ctrl-C works at once: Python runs signal handlers between slices.
SLICE_S = 0.1
# The interval of the `meanwhile` callback, if there is one.
MEANWHILE_S = 0.002

Meanwhile = Callable[[], None]
_HOST = torch.device("cpu")


class Group:
    """All code that communicates asks its replica's group each time, and never copies its fields.

    So a move to other ranks (`move`) is one assignment, and no part of a replica keeps using the old ones. The
    generation grows with every move; in an elastic job it is the job's.
    """

    def __init__(self, transport: Transport, timeout_s: float | None = None, *, owned: bool = True) -> None:
        """`timeout_s`: how long a wait for another rank may take. None: as long as the transport itself waits. A
        transport that is not `owned` belongs to its creator, and is not closed here."""
        self.transport = transport
        self._owned = owned
        self.timeout_s = timeout_s
        self.generation = 0
        # Held by the thread that watches peers: the waiting one, or the watcher while no thread waits.
        self.watching = threading.Lock()

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.size

    @property
    def single(self) -> bool:
        """Whether no other rank takes part: `Traits.single`, which is the same for all devices."""
        return self.transport.traits(_HOST).single

    def wait(self, work: Work, what: str, meanwhile: Meanwhile | None = None) -> None:
        """Wait for `work`; see `finish`."""
        with self.watching:
            finish(work, what=what, watch=self.transport.watch, timeout_s=self.timeout_s, meanwhile=meanwhile)

    def move(self, transport: Transport, generation: int | None = None) -> None:
        """Continue over another transport. The previous one is closed. `generation`: its number; None: the next one."""
        if transport is not self.transport:
            self.close()
            self.transport, self._owned = transport, True
        self.generation = self.generation + 1 if generation is None else generation

    def wait_a_moment(self, work: Work, what: str, seconds: float) -> bool:
        """Wait at most `seconds`. Returns whether `work` is complete, or raises a typed error as `wait` does."""
        return _wait_slice(work, what, self.transport.watch, time.monotonic(), seconds)

    def close(self) -> None:
        """Release what the transport holds. Idempotent."""
        if self._owned:
            self.transport.close()


def finish(
    work: Work, *, what: str, watch: Watch, timeout_s: float | None = None, meanwhile: Meanwhile | None = None
) -> None:
    """Wait for `work` until it is complete, or raise a typed error that says who is missing.

    `what` names the wait in reports, e.g. "bucket 2 of backward 17". `timeout_s=None` waits as long as the transport
    itself does. `meanwhile` is called repeatedly while this rank waits, to make progress on other collectives.
    """
    started = time.monotonic()
    slice_s = SLICE_S if meanwhile is None else MEANWHILE_S
    before: Phase | None = None  # the phase before the wait was noted
    try:
        while not _wait_slice(work, what, watch, started, slice_s):
            if meanwhile is not None:
                meanwhile()
            if before is None:
                before = own_progress().enter(Phase.WAITING)  # a rank that others wait for is not in here
            waited_s = time.monotonic() - started
            try:
                watch.look(what, waited_s)
            except PeerLost as lost:
                # It may have done its part before it ended, and its data may only just have arrived.
                try:
                    if _wait_slice(work, what, watch, started, slice_s):
                        return
                except CollectiveError:
                    raise lost from None  # it is more specific
                raise
            if timeout_s is not None and waited_s >= timeout_s:
                missing = watch.absent()
                names = ", ".join(f"rank {rank}" for rank in missing) or "an unknown rank"
                raise PeerAbsent(
                    f"waited {waited_s:.1f} s in {what} for {names}, which exceeds timeout={timeout_s:g} s; "
                    f"check what that rank is doing, or raise the timeout",
                    ranks=missing,
                )
    finally:
        if before is not None:
            own_progress().note(before)
            watch.left()


def _wait_slice(work: Work, what: str, watch: Watch, started: float, slice_s: float) -> bool:
    try:
        return work.wait(slice_s)
    except PacelineError:
        raise
    except RuntimeError as error:
        raise watch.explain(what, time.monotonic() - started, error) from error


class CallLog:
    """The collectives that a rank has started in one sequence, in order: the evidence of a deadlock.

    Written for every collective, so it does almost nothing: a call becomes text only on demand.
    """

    def __init__(self, threads: set[int]) -> None:
        """`threads`: those that start collectives of the group, in any sequence."""
        self.count = 0
        self._recent: deque[object] = deque(maxlen=16)
        self._threads = threads

    def began(self, call: object) -> None:
        """This thread has started a collective, which `str(call)` describes."""
        self._threads.add(get_ident())
        self.count += 1
        self._recent.append(call)

    def took_back(self) -> None:
        """The newest one was withdrawn before anything was sent, as if it had never been started."""
        self.count -= 1
        self._recent.pop()

    def recent(self) -> list[str]:
        """The newest ones as text."""
        return [str(call) for call in self._recent]
