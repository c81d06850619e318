"""Questions that all ranks answer alike in the same step, such as whether any rank was asked to stop."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

import torch

from paceline.checkpoint.ranks import OptionalGroup, rank_and_size
from paceline.collectives.checked import all_reduce
from paceline.errors import IllegalMove, UsageError
from paceline.member import in_elastic_job


class Cadence:
    """A question that all ranks answer together, at least once every `seconds`, although it is asked in every step.

    Rank 0's clock decides after how many calls the ranks communicate again, so all of them know without communicating.
    They do so more often where it costs less than a hundredth of the time: then it matters less if steps suddenly take
    longer.
    """

    COST = 0.01

    def __init__(self, seconds: float, group: OptionalGroup) -> None:
        self._seconds = seconds
        self._group = group
        self._calls_left = 0
        self._pause = 1
        self._asked_at = 0.0
        self._cost_s = math.inf

    def ask(self, flag: bool) -> bool | None:
        """Whether any rank said yes, or None when the ranks did not communicate in this call."""
        if self._calls_left > 0:
            self._calls_left -= 1
            return None
        leads = rank_and_size(self._group)[0] == 0
        own = torch.tensor([int(flag), self._next_pause() if leads else 0], device="cpu")
        started = time.monotonic()
        told = all_reduce(own, "max", group=self._group).tolist()
        self._cost_s = min(self._cost_s, time.monotonic() - started)  # the rest is waiting for late ranks
        self._pause = max(1, int(told[1]))
        self._calls_left = self._pause - 1
        return bool(told[0])

    def follow_group(self) -> None:
        """The world has changed: new ranks communicate in their first call, so all ranks do."""
        self._calls_left, self._pause, self._asked_at, self._cost_s = 0, 1, 0.0, math.inf

    def _next_pause(self) -> int:
        now = time.monotonic()
        per_call = (now - self._asked_at) / self._pause
        pause = 1
        if self._asked_at and per_call > 0:
            cheap = math.ceil(self._cost_s / self.COST / per_call)
            # It grows by doubling, because the first steps do not represent the others.
            pause = max(1, min(int(self._seconds / per_call), cheap, 2 * self._pause))
        self._asked_at = now
        return pause


class Preemption:
    """Catches the signals that announce preemption, SIGTERM and SIGUSR1, and lets all ranks stop in the same step.

        with Preemption() as preemption:
            for batch in loader:
                ...
                if preemption.agreed():
                    checkpointer.save(step, model=model, optimizer=optimizer)
                    break

    `asked` says whether this rank got a signal, and `signals` which ones; the process continues. `agreed()` is called
    by all ranks in every step and returns, the same on all, whether any rank got one. The ranks communicate at least
    once every `within` seconds (0: in every call). Earlier handlers are called too, and restored by `close()`.

    In an elastic job, declare it, `paceline.Elastic(preemption=preemption, ...)`: then the question is part of
    the step report, `agreed()` does not communicate, and ranks that have just joined know the answer too.
    """

    def __init__(
        self,
        signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1),
        *,
        within: float = 0.5,
        group: OptionalGroup = None,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise IllegalMove("Preemption must be created in the main thread: only there does Python handle signals")
        if not within >= 0:
            raise UsageError(f"within must be a number of seconds of at least 0, got {within!r}")
        self.signals: list[int] = []
        self._cadence = Cadence(within, group)
        self._agreed = False
        self._carried: Callable[[], None] | None = None  # tells all ranks of a signal, instead of the cadence
        self._earlier: dict[int, Any] = {}
        for number in signals:
            self._earlier[number] = signal.signal(number, self._on_signal)

    @property
    def asked(self) -> bool:
        """Whether this rank got one of the signals."""
        return bool(self.signals)

    def agreed(self) -> bool:
        """Whether any rank was asked. All ranks call it, in every step."""
        if self._agreed or self._carried is not None:
            return self._agreed
        if in_elastic_job():
            raise UsageError(
                "this Preemption was not declared to paceline.Elastic, so new ranks would ask when the others "
                "do not: pass it, as in Elastic(model=model, preemption=preemption, ...)"
            )
        self._agreed = bool(self._cadence.ask(self.asked))
        return self._agreed

    def carry(self, ask: Callable[[], None]) -> None:
        """From now on `ask` tells all ranks that this one got a signal, and `hear` receives what they agreed on."""
        self._carried = ask

    def hear(self, agreed: bool) -> None:
        """Store the agreement of all ranks. It is never withdrawn."""
        self._agreed = self._agreed or agreed

    def follow_group(self) -> None:
        """The world has changed. All ranks call it."""
        self._cadence.follow_group()

    def close(self) -> None:
        """Restore the earlier handlers."""
        while self._earlier:
            number, handler = self._earlier.popitem()
            # None: it was not set from Python, so Python cannot restore it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __enter__(self) -> "Preemption":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        if self._carried is not None:
            self._carried()
        earlier = self._earlier.get(number)
        if callable(earlier):
            earlier(number, frame)
