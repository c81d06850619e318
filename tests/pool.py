"""Real processes for tests, kept between tests and forked off one that has imported torch, because that costs seconds.

    results = procs(2).run(fn, *args)          # fn(rank, size, *args), module-level; one result per rank
    outcomes = procs(2).attempt(fn, *args)     # what became of each rank: a value, an error, or a death

Every call gets a fresh gloo group, the launcher's variables, seed 0 and one torch thread; afterwards the group is
destroyed and the environment restored. A worker that died, or that had to be killed, is replaced for the next call.
"""

import faulthandler
import importlib
import logging
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from tests.template import READY_S, Fork, Template

# Neighbours come from different templates: like ranks of a real job they hash strings differently.
TEMPLATES = 2
DEADLINE_S = 30.0
# After the first failure of a `run`, the other ranks have this long to fail or finish in their own way.
GRACE_S = 5.0


class RankFailed(Exception):
    """A rank raised something that cannot be sent, died, or did not answer before the deadline."""


@dataclass(frozen=True)
class Outcome:
    """What became of one rank in one call. Exactly one of value, error, exit code counts."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    exit_code: int | None = None  # of a worker that died, as subprocess gives it: -9 after SIGKILL
    hung: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code is None and not self.hung


@dataclass(frozen=True)
class _Call:
    module: str
    name: str
    args: bytes
    rank: int
    size: int
    folder: str
    group: bool
    deadline_s: float


class _Worker:
    """The parent's end of one process."""

    def __init__(self, template: Template) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.process: Fork = template.fork(theirs.fileno())
        self.ready = False
        self._code: int | None = None

    def wait_ready(self) -> None:
        if not self.ready:
            if not self.connection.poll(READY_S):
                self.end()
                raise RankFailed(f"a worker process was not ready within {READY_S:g} s")
            self.connection.recv()
            self.ready = True

    def end(self) -> int:
        """Kill and reap, once. Returns the exit code."""
        if self._code is None:
            self.connection.close()
            self._code = self.process.end()
        return self._code

    @property
    def ended(self) -> bool:
        return self._code is not None


class Pool:
    """The workers of a test session."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._templates: list[Template] = []

    def __call__(self, size: int) -> "Ranks":
        return Ranks(self, size)

    def workers(self, size: int) -> list[_Worker]:
        """The first `size` workers, started or replaced where needed."""
        self._templates = self._templates or [Template() for _ in range(TEMPLATES)]
        self.replace_dead()
        self._workers += [self._start(index) for index in range(len(self._workers), size)]
        chosen = self._workers[:size]
        for worker in chosen:
            worker.wait_ready()
        return chosen

    def replace_dead(self) -> None:
        self._templates = [Template() if template.closed else template for template in self._templates]
        for index, worker in enumerate(self._workers):
            if worker.ended or worker.process.dead:
                worker.end()
                self._workers[index] = self._start(index)

    def _start(self, index: int) -> _Worker:
        return _Worker(self._templates[index % TEMPLATES])

    def pids(self) -> set[int]:
        return {template.pid for template in self._templates} | {worker.process.pid for worker in self._workers}

    def descriptors(self) -> set[int]:
        found = {template.descriptor for template in self._templates if not template.closed}
        for worker in self._workers:
            if not worker.ended:
                found |= {worker.connection.fileno(), worker.process.descriptor}
        return found

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        for template in self._templates:
            template.close()
        self._templates.clear()


class Ranks:
    """`size` ranks of a pool, ready to run functions."""

    def __init__(self, pool: Pool, size: int) -> None:
        self._pool = pool
        self._size = size

    def run(self, fn: Callable[..., Any], *args: Any, group: bool = True, deadline_s: float = DEADLINE_S) -> list[Any]:
        """Run fn(rank, size, *args) on every rank; results in rank order. Raises what the first failing rank raised."""
        outcomes = self._gather(fn, args, group, deadline_s, grace_s=GRACE_S)
        failed = sorted((outcome for outcome in outcomes if not outcome.ok), key=lambda outcome: outcome.seconds)
        if not failed:
            return [outcome.value for outcome in outcomes]
        first = failed[0]
        others = "; ".join(describe(outcome) for outcome in failed[1:])
        error = first.error or RankFailed(describe(first))
        error.add_note(f"first failure: rank {first.rank} of {self._size}" + (f"; also {others}" if others else ""))
        raise error

    def attempt(
        self, fn: Callable[..., Any], *args: Any, group: bool = True, deadline_s: float = DEADLINE_S
    ) -> list[Outcome]:
        """As `run`, but failures and deaths are results too: for tests in which ranks are meant to fail."""
        return self._gather(fn, args, group, deadline_s, grace_s=deadline_s)

    def _gather(
        self, fn: Callable[..., Any], args: Sequence[Any], group: bool, deadline_s: float, *, grace_s: float
    ) -> list[Outcome]:
        workers = self._pool.workers(self._size)
        with tempfile.TemporaryDirectory(prefix="paceline-test-") as folder:
            for rank, worker in enumerate(workers):
                worker.connection.send(
                    _Call(
                        fn.__module__, fn.__qualname__, pickle.dumps(args), rank, self._size, folder, group, deadline_s
                    )
                )
            try:
                return _collect(workers, folder, deadline_s, grace_s)
            except BaseException:
                # Ctrl-C or a test's own timeout: what the workers do now is no longer known.
                for worker in workers:
                    worker.end()
                raise
            finally:
                self._pool.replace_dead()


def _collect(workers: list[_Worker], folder: str, deadline_s: float, grace_s: float) -> list[Outcome]:
    # One second more than the workers were told, so that a stuck one has written where it stands.
    started, until = time.monotonic(), time.monotonic() + deadline_s + 1.0
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    outcomes: dict[int, Outcome] = {}
    while waiting and time.monotonic() < until:
        for connection in wait(list(waiting), timeout=max(0.0, until - time.monotonic())):
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            outcomes[rank] = _receive(workers[rank], rank, started)
            if not outcomes[rank].ok:
                until = min(until, time.monotonic() + grace_s)
    for rank in waiting.values():
        workers[rank].end()
        stack = Path(folder, f"stack-{rank}")
        error = RankFailed(f"rank {rank} was still running")
        error.add_note(stack.read_text() if stack.exists() else "")
        outcomes[rank] = Outcome(rank, error=error, hung=True, seconds=time.monotonic() - started)
    return [outcomes[rank] for rank in range(len(workers))]


def _receive(worker: _Worker, rank: int, started: float) -> Outcome:
    try:
        value, pickled_error, text, ended = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        return Outcome(rank, exit_code=worker.end(), seconds=time.monotonic() - started)
    seconds = ended - started  # one clock for all processes of a machine
    if text is None:
        return Outcome(rank, value=value, seconds=seconds)
    error = pickle.loads(pickled_error) if pickled_error else RankFailed(text.strip().splitlines()[-1])
    error.add_note(f"on rank {rank}:\n{text}")
    return Outcome(rank, error=error, seconds=seconds)


def describe(outcome: Outcome) -> str:
    """One line about an outcome."""
    if outcome.exit_code is not None:
        code = outcome.exit_code
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"rank {outcome.rank} {how}"
    if outcome.error is not None:
        return f"rank {outcome.rank}: {type(outcome.error).__name__}: {outcome.error}"
    return f"rank {outcome.rank} returned {outcome.value!r}"


# ------------------------------------------------------------------------------------------- in the worker processes


def serve(descriptor: int) -> None:
    """Run calls until the other end goes away."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    connection = Connection(descriptor)
    connection.send("ready")
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        connection.send(_answer(call))


def _answer(call: _Call) -> tuple[Any, bytes, str | None, float]:
    ended = 0.0
    with Path(call.folder, f"stack-{call.rank}").open("w") as stack:
        faulthandler.dump_traceback_later(call.deadline_s, file=stack)
        try:
            with _call_state(call):
                fn: Any = importlib.import_module(call.module)
                for part in call.name.split("."):
                    fn = getattr(fn, part)
                try:
                    value = fn(call.rank, call.size, *pickle.loads(call.args))
                    pickle.dumps(value)
                finally:
                    # Leaving the group breaks the others: who failed first must be known from before that.
                    ended = time.monotonic()
            return value, b"", None, ended
        except BaseException as error:  # noqa: BLE001 - everything a test function raises goes to the parent
            return None, _pickled(error), traceback.format_exc(), ended or time.monotonic()
        finally:
            faulthandler.cancel_dump_traceback_later()


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - any failure means the same: the parent gets the text instead
        return b""
    return data


@contextmanager
def _call_state(call: _Call) -> Iterator[None]:
    import torch
    import torch.distributed as dist

    environ, excepthook, folder = dict(os.environ), sys.excepthook, Path.cwd()
    seats = {"RANK": call.rank, "WORLD_SIZE": call.size, "LOCAL_RANK": call.rank, "LOCAL_WORLD_SIZE": call.size}
    os.environ.update({name: str(value) for name, value in seats.items()}, MASTER_ADDR="127.0.0.1")
    torch.manual_seed(0)
    try:
        if call.group:
            _form_group(call)
        yield
    finally:
        if not dist.is_initialized():
            # torch names a group by a count that goes up even when forming it failed, and starts anew only when a
            # default group is destroyed; ranks with different counts would wait for each other for ever.
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environ)
        sys.excepthook = excepthook  # torch adds one at every init_process_group
        logging.getLogger("paceline").setLevel(logging.NOTSET)
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        if torch.are_deterministic_algorithms_enabled():  # asking first: the setter imports the compiler, 2 s
            torch.use_deterministic_algorithms(False)


def _form_group(call: _Call) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(Path(call.folder, "store")), call.size)
    dist.init_process_group("gloo", store=store, rank=call.rank, world_size=call.size)
    # A rank that fails at once would take the group down while others still connect to it.
    store.set(f"connected/{call.rank}", "")
    store.wait([f"connected/{rank}" for rank in range(call.size)])
