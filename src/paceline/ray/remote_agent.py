"""The driver's end of an agent: its calls and answers, and whether it still answers."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayError

from paceline.ray.agent import Agent
from paceline.ray.places import Place
from paceline.ray.rank_run import Event

BEAT_S = 1.0  # an agent answers at least this often
CLOSE_S = 10.0
# When an agent's process ends, Ray would kill the reaper before it has ended what its rank had started.
SPARES_REAPER = {"RAY_kill_child_processes_on_worker_exit": "0"}

Answer = Callable[["RemoteAgent", str, "Future[Any]"], None]


class RemoteAgent:
    """An agent that Ray places, or has placed. `answer` is called in a thread of Ray's with whatever it answers."""

    def __init__(self, slot: int, options: dict[str, Any], answer: Answer, now: float) -> None:
        self.slot = slot
        self.heard_at = now
        self.place: Place | None = None
        self._answer = answer
        remote: Any = ray.remote  # whose types do not know groups
        actor = remote(concurrency_groups={"polls": 1})(Agent)
        self._actor = actor.options(
            max_restarts=0, max_task_retries=0, runtime_env={"env_vars": SPARES_REAPER}, **options
        ).remote()
        self._ask("place", self._actor.place.remote())

    def placed(self, told: dict[str, Any], now: float) -> Place:
        """It has reported its place."""
        clock_ns = time.monotonic_ns() - told.pop("clock_ns")
        self.place = Place(**told, clock_ns=clock_ns)
        self.heard_at = now
        self.poll()
        return self.place

    def poll(self) -> None:
        """Ask what has happened."""
        self._ask("poll", self._actor.poll.options(concurrency_group="polls").remote(BEAT_S))

    def start(self, run: int, command: Sequence[str], environment: dict[str, str], folder: str) -> None:
        """Have it start a process."""
        self._actor.start.remote(run, list(command), environment, folder)

    def call(self, name: str, *arguments: Any) -> None:
        """Call one of its methods on its process."""
        getattr(self._actor, name).remote(*arguments)

    def close(self) -> Any:
        """Make it end its process and its descendants. Returns an object to wait for."""
        return self._actor.close.remote()

    def kill(self) -> None:
        """End the agent, wherever it is; its process ends with it."""
        ray.kill(self._actor)

    def _ask(self, what: str, reference: Any) -> None:
        reference.future().add_done_callback(lambda done: self._answer(self, what, done))


def answer_of(done: "Future[Any]") -> "dict[str, Any] | list[Event] | RayError":
    """The answer of an agent, or the error."""
    try:
        found: dict[str, Any] | list[Event] = done.result()
    except RayError as error:
        return error
    return found
