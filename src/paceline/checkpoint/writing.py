"""One generation on its way to disk, in a thread of its own."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from paceline.checkpoint.generations import Generation

NICENESS = 10


class Writing:
    """Runs `work`, which writes a generation, and then `tidy`, which removes older ones.

    A process that ends in the ordinary way waits for it.
    """

    def __init__(
        self, step: int, work: Callable[[], Generation], tidy: Callable[[], list[Path]], *, asynchronous: bool
    ) -> None:
        self.step = step
        self.error: BaseException | None = None
        self.generation: Generation | None = None
        self.seconds = 0.0
        self.removed: list[Path] = []
        self.untidy: OSError | None = None
        self._work = work
        self._tidy = tidy
        self._thread: threading.Thread | None = None
        if asynchronous:
            # Not a daemon: Python joins it before the interpreter goes away.
            self._thread = threading.Thread(target=self._run_beside, name=f"checkpoint of step {step}", daemon=False)
            self._thread.start()
        else:
            self._run()

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run_beside(self) -> None:
        with suppress(OSError):
            # On Linux a thread has its own niceness: the cores belong to training.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self._run()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self.generation = self._work()
        except BaseException as error:  # noqa: BLE001 - kept, and told to all ranks by the Checkpointer
            self.error = error
        else:
            try:
                self.removed = self._tidy()
            except OSError as error:
                self.untidy = error
        self.seconds = time.perf_counter() - started
