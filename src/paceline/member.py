"""This process as a member of an elastic job: the messages between it and its launcher.

The launcher decides who is in which generation (`launch/coordinator.py`); a member asks, waits and obeys. A thread
reads the launcher's messages, so a death is known at once whatever the main thread does.
"""

import os
import re
import select
import threading
import time
from collections.abc import Callable
from typing import ClassVar

from paceline.errors import IllegalMove, PeerLost, WorldNotFormed
from paceline.member_messages import (
    NEVER,
    Finished,
    FromLauncher,
    FromMember,
    Generation,
    MemberLeft,
    Refused,
    Regroup,
    StoreAt,
    from_launcher,
    to_line,
)
from paceline.progress import Phase, own_progress
from paceline.rank_report import MEMBER_NAME, MEMBERSHIP_NAME, deliver, inherited_descriptor

CHUNK = 1 << 16
SLICE_S = 0.1  # of a wait, so that Python handles signals


def in_elastic_job() -> bool:
    """Whether this process was started as a member of an elastic job. Its rank and world are then its generation's."""
    return not Member._forked and _named() is not None


def _named() -> tuple[int, int] | None:
    """This member's number, and the descriptor from which it reads its launcher's messages."""
    member = os.environ.get(MEMBER_NAME, "")
    descriptor = inherited_descriptor(os.environ.get(MEMBERSHIP_NAME, ""))
    return (int(member), descriptor) if re.fullmatch("[0-9]{1,9}", member) and descriptor is not None else None


class Member:
    """One member, from its start to its end. `own()` is that of this process; tests make others.

    `descriptor` is read and stays the caller's, `say` sends the launcher a line and returns whether it was delivered.
    """

    _own: "ClassVar[Member | None]" = None
    _forked: ClassVar[bool] = False  # a fork of a member is not that member

    def __init__(self, number: int, descriptor: int, say: Callable[[bytes], bool] = deliver) -> None:
        self.id = number
        self._say = say
        self._descriptor = descriptor
        self._changed = threading.Condition()  # guards all fields below
        self._generation: Generation | None = None
        self._stores: dict[int, tuple[str, int]] = {}
        self._ended: list[MemberLeft] = []
        self._regroup = NEVER
        self._finished = False
        self._refused = ""
        self._callbacks: list[Callable[[MemberLeft], None]] = []
        self._closing, self._close = os.pipe()
        self._reader = threading.Thread(target=self._read, name="paceline-member", daemon=True)
        self._reader.start()

    @classmethod
    def own(cls) -> "Member | None":
        """This process as a member; None outside an elastic job, and in processes that a member forked or started."""
        if cls._own is None and not cls._forked and (named := _named()) is not None:
            cls._own = cls(*named)
            os.set_inheritable(named[1], False)
            os.register_at_fork(after_in_child=_forget)
        return cls._own

    def close(self) -> None:
        """End the reading thread."""
        os.close(self._close)
        self._reader.join()
        os.close(self._closing)

    # Sending ---------------------------------------------------------------------------------------------------------

    def send(self, message: FromMember) -> None:
        """Tell the launcher something; it is not dropped. Raises `WorldNotFormed` when the launcher does not read."""
        if not self._say(to_line(message)):
            raise WorldNotFormed(f"member {self.id}: the launcher no longer reads messages ({message})")

    # State ----------------------------------------------------------------------------------------------------------

    @property
    def generation(self) -> Generation | None:
        """The newest generation that this member belongs to."""
        with self._changed:
            return self._generation

    def ended(self, generation: int) -> tuple[MemberLeft, ...]:
        """The members that have left a generation. It is over as soon as one has."""
        with self._changed:
            return self._left(generation)

    def wants_regroup(self, generation: int) -> bool:
        """Whether other members wait to join, so that this generation should end after the current step."""
        with self._changed:
            return self._regroup >= generation

    @property
    def finished(self) -> bool:
        """Whether another member has said that training is over. No generation is formed after that."""
        with self._changed:
            return self._finished

    def on_ended(self, call: Callable[[MemberLeft], None]) -> Callable[[], None]:
        """Call `call` from another thread whenever a member leaves. Returns a function that stops that."""
        with self._changed:
            self._callbacks.append(call)

        def stop() -> None:
            with self._changed:
                if call in self._callbacks:
                    self._callbacks.remove(call)

        return stop

    # Waiting --------------------------------------------------------------------------------------------------------

    def await_generation(self, after: int = NEVER) -> Generation:
        """The first generation later than `after` that this member belongs to: `MemberReady` must have been sent.

        Raises `WorldNotFormed` when the launcher refuses to form another, or has ended. There is no other limit: a
        spare may wait for as long as the job runs.
        """
        with own_progress().during(Phase.WAITING), self._changed:
            while self._generation is None or self._generation.number <= after:
                self._refuse()
                self._changed.wait(SLICE_S)
            return self._generation

    def await_store(self, generation: int, timeout_s: float = 60.0) -> tuple[str, int]:
        """Host and port of the store of a generation. Raises `PeerLost` if the generation ends before that."""
        deadline = time.monotonic() + timeout_s
        with own_progress().during(Phase.WAITING), self._changed:
            while generation not in self._stores:
                self._refuse()
                self._refuse_ended(generation)
                if time.monotonic() >= deadline:
                    raise WorldNotFormed(
                        f"member {self.id}: the first member of generation {generation} did not report within "
                        f"{timeout_s:g} s where its store listens"
                    )
                self._changed.wait(SLICE_S)
            return self._stores[generation]

    def _refuse(self) -> None:
        if self._finished:
            raise WorldNotFormed(f"member {self.id}: training is finished, so no other generation is formed")
        if self._refused:
            raise WorldNotFormed(self._refused)

    def _refuse_ended(self, generation: int) -> None:
        if left := self._left(generation):
            who = "; ".join(f"member {one.member} {one.reason}" for one in left)
            raise PeerLost(f"generation {generation} ended before it was formed: {who}")
        if self._generation is not None and self._generation.number > generation:
            now = self._generation.number
            raise IllegalMove(f"generation {generation} is over: member {self.id} is in generation {now}")

    def _left(self, generation: int) -> tuple[MemberLeft, ...]:
        return tuple(one for one in self._ended if one.generation == generation)

    # The reading thread -----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        waiting = select.poll()
        waiting.register(self._descriptor, select.POLLIN)
        waiting.register(self._closing, select.POLLIN)
        rest = b""
        while True:
            if any(descriptor == self._closing for descriptor, _ in waiting.poll()):
                return
            data = os.read(self._descriptor, CHUNK)
            if not data:
                self._take_in(Refused("the launcher has ended"))
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if (message := from_launcher(line)) is not None:
                    self._take_in(message)

    def _take_in(self, message: FromLauncher) -> None:
        with self._changed:
            if isinstance(message, Generation):
                self._enter(message)
            elif isinstance(message, StoreAt):
                self._stores[message.generation] = message.host, message.port
            elif isinstance(message, MemberLeft):
                self._ended.append(message)
            elif isinstance(message, Regroup):
                self._regroup = max(self._regroup, message.generation)
            elif isinstance(message, Finished):
                self._finished = True
            else:
                self._refused = self._refused or message.reason
            callbacks = list(self._callbacks)
            self._changed.notify_all()
        if isinstance(message, MemberLeft):
            for call in callbacks:
                call(message)

    def _enter(self, generation: Generation) -> None:
        if self.id in generation.members:
            self._generation = generation
            # Earlier ones than that are no longer asked about.
            oldest = generation.number - 1
            self._ended = [one for one in self._ended if one.generation >= oldest]
            self._stores = {number: at for number, at in self._stores.items() if number >= oldest}


def _forget() -> None:
    Member._own, Member._forked = None, True
