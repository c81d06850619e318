"""The collectives that a rank has started, in order: what a deadlock is proven from."""

from _thread import get_ident
from collections import deque


class CallLog:
    """Those of one line, on one rank. Written for every collective, so it does next to nothing."""

    def __init__(self, threads: set[int]) -> None:
        """`threads`: those that start collectives of the group, in any line."""
        self.count = 0
        self.recent: deque[str] = deque(maxlen=16)  # the newest, in words
        self._threads = threads

    def began(self, call: str) -> None:
        """This thread has started a collective."""
        self._threads.add(get_ident())
        self.count += 1
        self.recent.append(call)

    def took_back(self) -> None:
        """The newest one was given up before anything was sent, as if it had never been started."""
        self.count -= 1
        self.recent.pop()
