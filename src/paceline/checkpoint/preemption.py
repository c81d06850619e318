"""Being asked to stop: a signal to any rank becomes one decision of all ranks, in the same step."""

import signal
import threading
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

from paceline.checkpoint.agree import Cadence, Group
from paceline.errors import IllegalMove, UsageError


class Preemption:
    """Listens to signals that announce the end, SIGTERM and SIGUSR1, and lets all ranks agree on it.

        with Preemption() as preemption:
            for batch in loader:
                ...
                if preemption.agreed():
                    checkpointer.save(step, model=model, optimizer=optimizer)
                    break

    `asked` says whether this rank got a signal, and `signals` which; the process goes on. `agreed()` is called by all
    ranks in every step and says whether any of them was asked, the same on all. The ranks talk at least once in
    `within` seconds (0: in every call). Handlers that were there before are called too, and restored by `close()`.
    """

    def __init__(
        self,
        signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1),
        *,
        within: float = 0.5,
        group: Group = None,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise IllegalMove("Preemption must be made in the main thread: Python handles signals nowhere else")
        if not within >= 0:
            raise UsageError(f"within must be a number of seconds of at least 0, got {within!r}")
        self.signals: list[int] = []
        self._cadence = Cadence(within, group)
        self._agreed = False
        self._earlier: dict[int, Any] = {}
        for number in signals:
            self._earlier[number] = signal.signal(number, self._on_signal)

    @property
    def asked(self) -> bool:
        """Whether this rank got one of the signals."""
        return bool(self.signals)

    def agreed(self) -> bool:
        """Whether any rank was asked. All ranks call it, in every step."""
        if not self._agreed:
            self._agreed = bool(self._cadence.ask(self.asked))
        return self._agreed

    def close(self) -> None:
        """Put the earlier handlers back."""
        while self._earlier:
            number, handler = self._earlier.popitem()
            # None: it was not set from Python, so Python cannot put it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def __enter__(self) -> "Preemption":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
        earlier = self._earlier.get(number)
        if callable(earlier):
            earlier(number, frame)
