"""The ranks that work together now, and the transport between them."""

import threading

from paceline.collectives.api import Transport, Work
from paceline.collectives.wait import Beside, finish


class Group:
    """Everyone who talks to other ranks asks the group of its replica each time, and nobody copies what it holds.

    So a move to other ranks (`move`) is one assignment, and no part of a replica can stay behind with the old ones. The
    generation grows by one at every move.
    """

    def __init__(self, transport: Transport, timeout_s: float | None = None, *, owned: bool = True) -> None:
        """`timeout_s`: how long a wait for another rank may take. None: as long as the transport itself waits. A
        transport that is not `owned` belongs to whoever made it, and is not closed here."""
        self.transport = transport
        self._owned = owned
        self.timeout_s = timeout_s
        self.generation = 0
        # Held by whoever looks after peers: the thread that waits, or the one that watches while no thread waits.
        self.watching = threading.Lock()

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.size

    def wait(self, work: Work, what: str, beside: Beside | None = None) -> None:
        """Wait for `work`; see `collectives.wait.finish`."""
        with self.watching:
            finish(work, what=what, watch=self.transport.watch, timeout_s=self.timeout_s, beside=beside)

    def move(self, transport: Transport) -> None:
        """Go on over another transport. The one before is given back."""
        if transport is not self.transport:
            self.close()
            self.transport, self._owned = transport, True
        self.generation += 1

    def close(self) -> None:
        """Give back what the transport holds."""
        if self._owned:
            self.transport.close()
