"""Exchange between ranks that have no transport yet, through the store of their group."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.collectives.group import finish
from paceline.collectives.peers import FOREIGN
from paceline.collectives.protocols import Watch
from paceline.collectives.store_call import StoreCall
from paceline.errors import MessageDamaged
from paceline.typed_json import shown

T = TypeVar("T")
_POSTED = re.compile(rb"(\d{1,18}) (.*)", re.DOTALL)


class NoSharedMemory(Exception):
    """Why the ranks of a group cannot share memory, in one line. It is raised on all of them."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """All ranks of a group, at one unused `place` of its store."""

    place: Store
    rank: int
    size: int
    watch: Watch
    timeout_s: float | None

    @classmethod
    def next(cls, store: Store, rank: int, size: int, watch: Watch, timeout_s: float | None) -> "Rendezvous":
        """The n-th rendezvous of one rank is that of every other."""
        number = store.add(f"paceline/rendezvous count/{rank}", 1)
        return cls(PrefixStore(f"paceline/rendezvous {number}", store), rank, size, watch, timeout_s)

    def gather(self, topic: str, text: str) -> list[str]:
        """The text of every rank."""
        gather = StoreGather(self.place, topic, self.rank, self.size, text)
        return self.call(gather.run, what=f"the choice of a transport ({topic})")

    def check(self, topic: str, obstacle: str) -> None:
        """Return if no rank has an obstacle, else raise NoSharedMemory with the first one on every rank."""
        if obstacles := [text for text in self.gather(topic, obstacle) if text]:
            raise NoSharedMemory(obstacles[0])

    def call(self, call: Callable[[StoreCall[T]], T], *, what: str) -> T:
        """Run something that may block, on a thread, and wait for it as for any other rank."""
        calling = StoreCall(call)
        try:
            finish(calling, what=what, watch=self.watch, timeout_s=self.timeout_s)
        finally:
            calling.stop()
        return calling.result()


def posted_in(text: bytes, key: str) -> tuple[int, str]:
    """The number of the gather in which a rank has posted this, and its text; -1 if it was taken back. Raises
    MessageDamaged if no rank has posted it."""
    if not text:
        return -1, ""
    found = _POSTED.fullmatch(text)
    if found is None:
        raise MessageDamaged(f"{key!r} on the group's store: expected what a rank posts, got {shown(text)}; {FOREIGN}")
    return int(found[1]), found[2].decode(errors="replace")


class StoreGather:
    """Exchanges one text per rank through a store. The n-th gather of a rank under a `topic` is the n-th of all.

    The number is counted on the store, so that no state outlives the group.
    """

    def __init__(self, store: Store, topic: str, rank: int, size: int, text: str) -> None:
        self._store = store
        self._topic = topic
        self._rank = rank
        self._size = size
        self._text = text

    def run(self, call: StoreCall[list[str]]) -> list[str]:
        """Post this rank's text and read those of all ranks. Returns an empty list if it is stopped before all have
        posted."""
        number = self._store.add(self._counter, 1)
        self._store.set(self._key(number, self._rank), f"{number} {self._text}")
        pause_s = 0.00005
        while not (found := self._read(number)):
            if not call.pause(pause_s):
                return self._take_back(number)
            pause_s = min(1.2 * pause_s, 0.02)
        return found

    def _take_back(self, number: int) -> list[str]:
        """Undo this rank's post, so that a second try finds the others.

        Not if the last rank has posted meanwhile: then some may have seen this rank's post, and continued.
        """
        key = self._key(number, self._rank)
        self._store.set(key, "")
        if found := self._read(number):
            self._store.set(key, f"{number} {self._text}")
            return found
        self._store.add(self._counter, -1)
        return []

    def _read(self, number: int) -> list[str]:
        """The posts of all ranks, or an empty list if some are missing."""
        keys = [self._key(number, peer) for peer in range(self._size) if peer != self._rank]
        if number <= 2 and not self._store.check(keys):  # `multi_get` waits for a key that was never set
            return []
        posted = [posted_in(text, key) for key, text in zip(keys, self._store.multi_get(keys), strict=True)]
        if any(found != number for found, _ in posted):
            return []
        texts = [text for _, text in posted]
        texts.insert(self._rank, self._text)
        return texts

    @property
    def _counter(self) -> str:
        return f"{self._topic}/count/{self._rank}"

    def _key(self, number: int, rank: int) -> str:
        # Two places are enough: a rank that posts has seen all posts of the previous gather, so all have read the one
        # before that.
        return f"{self._topic}/{number % 2}/{rank}"
