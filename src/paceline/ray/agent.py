"""The agent on the machines of a Ray cluster: an actor that supervises one rank there, as the launcher does on its own
machine.

The rank is a child of the launcher's reaper (`launch/reaper.py`), which ends it with its descendants when the
agent dies. An agent without a message from its driver for `DRIVER_S` ends its rank on its own: the job may have
continued without it.
"""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.launch.rank_environment import reserve_port
from paceline.ray.network import interface_of
from paceline.ray.rank_run import Event, RankRun

TICK_MS = 50
NOTES_S = 0.25
DRIVER_S = 10.0
# This much output may wait for the driver; beyond that the rank's pipes are not read.
MAX_WAITING = 8 << 20


class Agent:
    """One slot of a job. Ray calls `poll` in one thread and the other methods in another, each in order."""

    def __init__(self, node: str = "", address: str = "") -> None:
        self._node, self._address = (node, address) if node else _whereabouts()
        self._port = reserve_port(host=self._address)
        self._run: RankRun | None = None
        self._events: deque[Event] = deque()
        self._waiting = 0  # bytes among them
        self._something = threading.Condition()  # guards both
        self._heard_at = time.monotonic()
        self._closing = False
        self._commands: deque[tuple[str, int, tuple[Any, ...]]] = deque()
        self._wake, self._wakened = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="paceline-agent", daemon=True)
        self._thread.start()

    # Called by the driver ---------------------------------------------------------------------------------------------

    def place(self) -> dict[str, Any]:
        """The place of this agent: the address for other machines, and a free port."""
        self._heard_at = time.monotonic()
        return {
            "node": self._node,
            "address": self._address,
            "interface": interface_of(self._address),
            "port": self._port.getsockname()[1],
            "gpus": tuple(gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu),
            "clock_ns": time.monotonic_ns(),
        }

    def start(self, run: int, command: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
        """Start process number `run` of this slot."""
        self._command("start", run, command, environment, folder)

    def signal(self, run: int, number: int) -> None:
        """Send the process a signal."""
        self._command("signal", run, number)

    def abort(self, run: int) -> None:
        """Make the process dump its threads' stacks and abort."""
        self._command("abort", run)

    def tell(self, run: int, data: bytes) -> None:
        """Write to the process as a member of an elastic job."""
        self._command("tell", run, data)

    def poll(self, wait_s: float) -> list[Event]:
        """The events since the last call, as soon as there are any; empty after `wait_s`."""
        self._heard_at = time.monotonic()
        with self._something:
            self._something.wait_for(lambda: self._events or self._closing, wait_s)
            found = list(self._events)
            self._events.clear()
            self._waiting = 0
        return found

    def close(self) -> None:
        """End the process and its descendants, and return when nothing is left. Idempotent."""
        if not self._closing:
            self._closing = True
            os.write(self._wakened, b"\0")
            self._thread.join()
            self._port.close()
            os.close(self._wake)
            os.close(self._wakened)

    # The serving thread -----------------------------------------------------------------------------------------------

    def _command(self, name: str, run: int, *arguments: Any) -> None:
        if not self._closing:
            self._commands.append((name, run, arguments))
            os.write(self._wakened, b"\0")

    def _serve(self) -> None:
        notes_at = 0.0
        while not self._closing:
            ready = self._await_something()
            if time.monotonic() - self._heard_at > DRIVER_S:
                self._end_run()  # the driver has ended, or has given up this agent
            while self._commands:
                name, number, arguments = self._commands.popleft()
                self._do(name, number, arguments)
            if self._run is not None and not self._run.over:
                self._take_in(self._run.read(ready))
                if time.monotonic() >= notes_at:
                    notes_at = time.monotonic() + NOTES_S
                    self._take_in(self._run.notes())
        self._end_run()

    def _await_something(self) -> set[int]:
        waiting = select.poll()
        waiting.register(self._wake, select.POLLIN)
        if self._run is not None and not self._run.over and self._waiting < MAX_WAITING:
            for descriptor in self._run.descriptors:
                waiting.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in waiting.poll(TICK_MS)}
        if self._wake in ready:
            os.read(self._wake, 4096)
        return ready

    def _do(self, name: str, number: int, arguments: tuple[Any, ...]) -> None:
        if name == "start":
            self._end_run()
            try:
                self._run = RankRun(number, *arguments)
            except OSError as error:
                self._take_in([(number, "exited", {"rank": 0, "never": str(error), "code": 1})])
        elif self._run is not None and self._run.number == number and not self._run.over:
            getattr(self._run, name)(*arguments)

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._take_in(run.close())

    def _take_in(self, events: list[Event]) -> None:
        if events:
            with self._something:
                self._events += events
                self._waiting += sum(len(what) for _, _, what in events if isinstance(what, bytes))
                self._something.notify_all()


def _whereabouts() -> tuple[str, str]:
    """This machine's name in the cluster, and its address there."""
    import ray

    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
