"""Runs upstream tests in a process of their own, with our class in the place of torch's.

The process (tests/conformance/driver.py) and its ranks are a session of their own, so that the lot can be ended by its
id. It is kept for as long as tests of the same source follow each other, because starting it costs seconds.
"""

import os
import signal
import subprocess
import sys
from multiprocessing.connection import Pipe
from pathlib import Path

from tests.conformance.driver import READY, Order, Outcome
from tests.conformance.suites import UpstreamTest, write_module

ROOT = Path(__file__).parents[2]
READY_S = 60.0
UPSTREAM_S = 90  # after which upstream's own code gives a test up and shows where its ranks stand
DEADLINE_S = 110.0
_SERVE = "from tests.conformance.driver import serve; serve({fd}, {module!r})"


class NoAnswer(Exception):
    """The process that runs the tests died, or a test did not end in time."""


class Driver:
    """Our end of one process."""

    def __init__(self, test: UpstreamTest, folder: Path) -> None:
        self.source = test.source
        self.alone = test.suite.alone
        self._log = folder / "output.log"
        module = write_module(test, folder)
        self._connection, theirs = Pipe()
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE.format(fd=theirs.fileno(), module=module)],
                cwd=folder,
                env=_environment(folder),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if self._receive(READY_S) != READY:
            raise NoAnswer("the process did not start as expected")

    def run(self, test: UpstreamTest) -> Outcome:
        self._connection.send(Order(test.name, test.suite.world_size))
        outcome = self._receive(DEADLINE_S)
        assert isinstance(outcome, Outcome)
        return outcome

    @property
    def alive(self) -> bool:
        return not self._connection.closed and self._process.poll() is None

    def end(self) -> None:
        if not self._connection.closed:
            # Before wait(): until then the id cannot belong to anyone else.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._connection.close()

    def _receive(self, timeout_s: float) -> object:
        try:
            if not self._connection.poll(timeout_s):
                raise NoAnswer(f"no answer within {timeout_s:g} s")
            return self._connection.recv()
        except BaseException as error:  # also pytest's own timeout: what the ranks do now is no longer known
            self.end()
            error.add_note(self._log.read_text(errors="replace")[-4000:])
            raise


def _environment(folder: Path) -> dict[str, str]:
    path = [str(folder), str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "BACKEND": "gloo",
        "CUDA_VISIBLE_DEVICES": "",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(UPSTREAM_S),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "WORLD_SIZE": "2",
    }


class Runner:
    """Keeps a process ready for the test at hand."""

    def __init__(self) -> None:
        self._driver: Driver | None = None

    def prepare(self, test: UpstreamTest, folder: Path) -> None:
        """Have a process that can run `test`; a new one if the last one cannot."""
        last = self._driver
        if last is None or last.alone or last.source != test.source or not last.alive:
            self.close()
            self._driver = Driver(test, folder)

    def run(self, test: UpstreamTest) -> Outcome:
        assert self._driver is not None
        return self._driver.run(test)

    def close(self) -> None:
        if self._driver is not None:
            self._driver.end()
            self._driver = None
