"""The police sees each kind of thing that a test can leave behind."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.conftest import Belongings, _leaked_group, _leaks
from tests.pool import Pool

PIPE_SPENT = ["pipe:[0]"]


@contextmanager
def a_variable() -> Iterator[None]:
    os.environ["PACELINE_LEFT"] = "1"
    yield
    del os.environ["PACELINE_LEFT"]


@contextmanager
def a_thread() -> Iterator[None]:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="left")
    thread.start()
    yield
    done.set()
    thread.join()


@contextmanager
def a_process() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield
        child.kill()


@contextmanager
def a_descriptor() -> Iterator[None]:
    ends = os.pipe()
    yield
    for end in ends:
        os.close(end)


@contextmanager
def a_segment() -> Iterator[None]:
    # A plain file there is what a segment is; multiprocessing's own class would start a process that stays.
    segment = Path(f"/dev/shm/paceline-left-{os.getpid()}")
    segment.touch()
    yield
    segment.unlink()


@pytest.mark.parametrize(
    ("left", "complaint"),
    [
        (a_variable, "environment: PACELINE_LEFT was None, is '1'"),
        (a_thread, "thread: left"),
        (a_process, "child process: "),
        (a_descriptor, "file descriptor: "),
    ],
)
def test_what_is_left_is_seen(left: type, complaint: str) -> None:
    before = Belongings.now()
    with left():
        assert any(leak.startswith(complaint) for leak in _leaks(before, Pool(), PIPE_SPENT))
    assert _leaks(before, Pool(), PIPE_SPENT) == []


def test_shared_memory_is_seen() -> None:
    before = Belongings.now()
    with a_segment():
        assert any(
            leak.startswith("shared memory: /dev/shm/paceline-left-") for leak in _leaks(before, Pool(), PIPE_SPENT)
        )


def test_a_segment_torn_by_a_death_is_removed_and_nobodys_leak() -> None:
    before = Belongings.now()
    with subprocess.Popen(["true"]) as dead:
        pass
    torn, left = (Path(f"/dev/shm/torch_{pid}_1_0") for pid in (dead.pid, os.getpid()))
    torn.touch()
    left.touch()
    leaks = _leaks(before, Pool(), PIPE_SPENT)
    left.unlink()
    assert f"shared memory: {left}" in leaks and f"shared memory: {torn}" not in leaks
    assert not torn.exists()


def test_a_group_is_seen_and_destroyed() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert _leaked_group() == ["process group: still initialised"]
    assert not dist.is_initialized()


def test_one_lazy_pipe_is_forgiven_once() -> None:
    before = Belongings.now()
    spent: list[str] = []
    with a_descriptor():
        assert _leaks(before, Pool(), spent) == []
        with a_descriptor():
            assert len(_leaks(before, Pool(), spent)) == 2
