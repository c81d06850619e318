"""Fixtures for all tests: real processes, and the police that fails a test which leaves something behind."""

import gc
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

from tests.pool import Pool

pytest_plugins = ["tests.cores"]

# A busy machine is no reason for a property to fail; pytest's timeout ends what hangs.
hypothesis.settings.register_profile("paceline", deadline=None, max_examples=50)
hypothesis.settings.load_profile("paceline")

# Opened once per process by libraries, on first use, and never closed. The pipe of libuv (inside torch's TCPStore) is
# another such thing: one pair of pipe ends is forgiven once per session, see `lazy_pipe`.
LAZY_FILES = ("/dev/urandom", "/dev/null", "/dev/nvidia", "/proc/", "/sys/")


def pytest_sessionstart() -> None:
    """Shells start background jobs with these two ignored, and a child inherits that; tests must not depend on it."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(scope="session")
def procs() -> Iterator[Pool]:
    """`procs(n).run(fn, *args)` runs fn(rank, size, *args) on n real processes; see tests/pool.py."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 that nobody else is given while the test runs, and that the test may listen on."""
    with socket.socket() as holder:
        # Bound and not listening: Linux lets a second socket with SO_REUSEADDR bind and listen beside it.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


# Set by pytest for every test, and by torch when it first imports its compiler.
NOT_OURS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}


@dataclass(frozen=True)
class Belongings:
    """What this process holds that a test must give back."""

    environment: dict[str, str]
    threads: set[threading.Thread]
    children: set[int]
    descriptors: dict[int, str]
    shared_memory: set[str]

    @classmethod
    def now(cls) -> "Belongings":
        environment = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
        threads = {thread for thread in threading.enumerate() if thread.is_alive()}
        shared_memory = {entry.name for entry in Path("/dev/shm").iterdir()}
        return cls(environment, threads, _children(), _descriptors(), shared_memory)


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            found.update(int(pid) for pid in task.read_text().split())
    return found


def _descriptors() -> dict[int, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = str(entry.readlink())
        except FileNotFoundError:  # the one through which the folder was read
            continue
    return found


def _new_descriptors(before: Belongings, after: Belongings, allowed: set[int], lazy_pipe: list[str]) -> list[str]:
    fresh = {
        number: target
        for number, target in after.descriptors.items()
        if before.descriptors.get(number) != target and number not in allowed and not target.startswith(LAZY_FILES)
    }
    pipes = [target for target in fresh.values() if target.startswith("pipe:")]
    if not lazy_pipe and len(pipes) == 2 and len(set(pipes)) == 1:
        lazy_pipe.append(pipes[0])
    return [f"{number} → {target}" for number, target in sorted(fresh.items()) if target not in lazy_pipe]


def _leaks(before: Belongings, pool: Pool, lazy_pipe: list[str]) -> list[str]:
    after = Belongings.now()
    found: list[str] = []
    for name in sorted(before.environment.keys() | after.environment.keys()):
        old, new = before.environment.get(name), after.environment.get(name)
        if old != new:
            found.append(f"environment: {name} was {old!r}, is {new!r}")
    found += [f"thread: {thread.name}" for thread in after.threads - before.threads]
    found += [f"child process: {pid}" for pid in after.children - before.children - pool.pids()]
    found += [f"file descriptor: {text}" for text in _new_descriptors(before, after, pool.descriptors(), lazy_pipe)]
    for name in sorted(after.shared_memory - before.shared_memory):
        if not _held_by_strangers(name, pool.pids()) and not _torn(name):
            found.append(f"shared memory: /dev/shm/{name}")
    return found


def _leaked_group() -> list[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["process group: still initialised"]


def _held_by_strangers(name: str, pool_pids: set[int]) -> bool:
    """Other people's programs use /dev/shm too; what a live process that is not ours has mapped is not our leak."""
    try:
        found = Path("/dev/shm", name).stat()
    except FileNotFoundError:  # gone meanwhile
        return True
    # By number: a semaphore is mapped before it gets its name.
    mapping = f" {os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x} {found.st_ino} "
    ours = pool_pids | {os.getpid()}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if int(maps.parent.name) not in ours and mapping in maps.read_text():
                return True
        except OSError:  # gone meanwhile, or not ours to read
            continue
    return False


def _torn(name: str) -> bool:
    """torch names a segment and unlinks it a moment later. A process that dies in between leaves it: nobody's leak."""
    maker = re.match(r"torch_(\d+)_", name)
    if maker is None or Path("/proc", maker[1]).exists():
        return False
    Path("/dev/shm", name).unlink(missing_ok=True)
    return True


@pytest.fixture(scope="session")
def lazy_pipe() -> list[str]:
    return []


@pytest.fixture(autouse=True)
def leak_police(request: pytest.FixtureRequest, lazy_pipe: list[str]) -> Iterator[None]:
    """Fails a test that leaves environment, threads, processes, descriptors, shared memory or a group behind."""
    pool = request.getfixturevalue("procs") if "procs" in request.fixturenames else Pool()
    before = Belongings.now()
    yield
    group = _leaked_group()
    leaks = _leaks(before, pool, lazy_pipe)
    if leaks:
        # Cycles keep sockets and processes alive until the collector runs; only what survives it is a leak.
        gc.collect()
        # Threads that feed queues, and processes that were told to end, take a moment.
        deadline = time.monotonic() + 1.0
        while (leaks := _leaks(before, pool, lazy_pipe)) and time.monotonic() < deadline:
            time.sleep(0.02)
    if group or leaks:
        for name in set(os.environ) - NOT_OURS:
            del os.environ[name]
        os.environ.update(before.environment)
        pytest.fail("the test left behind:\n  " + "\n  ".join(group + leaks), pytrace=False)
