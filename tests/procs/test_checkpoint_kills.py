"""Saves that are killed at every stage and at every system call, and disks that fail: the one before stays whole.

One process that has torch loaded forks a child for each case.
"""

import ctypes
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import Checkpointer, CheckpointError, NotSaved, joint, manifest, snapshots
from paceline.checkpoint.joint import JointWrite
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.open_snapshot import OpenSnapshot
from paceline.checkpoint.writer import write_part, write_snapshot
from paceline.stored.directory import LOCK

OLDER, OLD, NEW = 5, 10, 20
NOT_OF_THE_SAVE = ("exit_group", "restart_syscall", "rt_sigtimedwait")


class Nursery:
    """The process that forks."""

    def __init__(self) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from tests.procs.test_checkpoint_kills import nurse; nurse()"
        environ = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            text=True,
        )
        assert self._line() == "ready"

    def fork(self, task: Callable[..., Any], *args: Any) -> int:
        """Start `task(*args)` in a child, and return its id."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([task.__name__, args]) + "\n")
        self.process.stdin.flush()
        return int(self._line())

    def exit_code(self) -> int:
        """Wait for the child: 0, or minus the signal that killed it."""
        return int(self._line())

    def run(self, task: Callable[..., Any], *args: Any) -> int:
        self.fork(task, *args)
        return self.exit_code()

    def close(self) -> None:
        with self.process:
            self.process.kill()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def nurse() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # a child may get it before it waits for it
    with tempfile.TemporaryDirectory() as directory:  # what a first save imports is not to be counted as the save's
        Checkpointer(directory, asynchronous=False).save(1, **state(1))
    say = os.fdopen(1, "w", buffering=1)
    say.write("ready\n")
    for line in sys.stdin:
        name, args = json.loads(line)
        child = os.fork()
        if child == 0:
            globals()[name](*args)  # what it raises ends the child in the ordinary way
            os._exit(0)
        say.write(f"{child}\n")
        say.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(autouse=True)
def _started(nursery: Nursery) -> None:
    """Before the leak police looks: it lives longer than one test."""


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((30_000,), float(step)), "note": {"step": step}}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two snapshots that were saved well."""
    directory = tmp_path_factory.mktemp("template")
    checkpointer = Checkpointer(directory, asynchronous=False)
    for step in (OLDER, OLD):
        assert checkpointer.save(step, **state(step)).problem is None
    return directory


@pytest.fixture
def fresh(template: Path, tmp_path: Path) -> Callable[[], Path]:
    """Makes a copy of the template, in the place of the last one."""

    def copy() -> Path:
        directory = tmp_path / "checkpoints"
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(template, directory)
        return directory

    return copy


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir() if entry.name != LOCK)


def newest(directory: Path) -> int:
    """The step that a new process would go on from; all of it is compared."""
    loaded = Checkpointer(directory).load()
    assert loaded.more["note"] == {"step": loaded.step}
    assert torch.equal(loaded.more["weight"], torch.full((30_000,), float(loaded.step)))
    assert loaded.skipped == (), "no half of a snapshot is ever seen"
    return loaded.step


def check_goes_on(directory: Path) -> None:
    """The next save finds a way, and leaves nothing of the killed one behind."""
    checkpointer = Checkpointer(directory, asynchronous=False)
    assert checkpointer.save(NEW + 10, **state(NEW + 10)).problem is None
    assert newest(directory) == NEW + 10
    assert all(snapshots.NAME.match(name) for name in names(directory))


# Tool-free: killed before each call that makes, syncs or renames something.


def save_until(directory: str, stop: int) -> None:
    calls = 0

    def kill_before(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if calls == stop:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
        return call(*args, **kwargs)

    for name in ("mkdir", "fsync", "rename"):
        setattr(os, name, partial(kill_before, getattr(os, name)))
    fields = Manifest(NEW, 3, 1, 1, {}, {}, manifest.versions())
    write_snapshot(Path(directory), fields, {"a": [b"x" * 5000], "b": [b"y"]})


def test_killed_at_every_stage_of_a_save(nursery: Nursery, fresh: Callable[[], Path]) -> None:
    found = []
    for stop in range(50):
        directory = fresh()
        if nursery.run(save_until, str(directory), stop) == 0:
            break
        whole, broken = snapshots.survey(directory)
        for snapshot in whole:
            opened = OpenSnapshot(snapshot)
            opened.verify(opened.chunks())
        assert not broken
        assert {OLDER, OLD} <= {snapshot.step for snapshot in whole}
        found.append(whole[0].step)
        snapshots.remove_abandoned(directory)
        assert all(snapshots.NAME.match(name) for name in names(directory))
    assert found == [OLD] * 6 + [NEW], "mkdir, four fsyncs, rename, and the fsync of the parent"


# With strace: killed at each system call.


def save_when_told(directory: str) -> None:
    checkpointer = Checkpointer(directory, keep=2, asynchronous=False)
    contents = state(NEW)
    signal.sigwait([signal.SIGUSR1])
    problem = checkpointer.save(NEW, **contents).problem
    os._exit(0 if problem is None else 9)


@contextmanager
def traced(nursery: Nursery, directory: Path, *options: str) -> Iterator[None]:
    """A save under strace, which is attached just before."""
    child = nursery.fork(save_when_told, str(directory))
    command = ["strace", "-f", "-p", str(child), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        said = tracer.stderr.readline()
        os.kill(child, signal.SIGUSR1)
        if "attached" not in said:
            nursery.exit_code()
            pytest.skip(f"strace cannot attach here: {said.strip()}")
        tracer.stderr.read()
    yield


def calls_in(log: Path) -> Counter[str]:
    """How often each system call stands in the log of strace."""
    rows = [line.split(maxsplit=1)[1] for line in log.read_text().splitlines()]
    return Counter(row.partition("(")[0] for row in rows if "(" in row and not row.startswith(("+", "-", "<")))


@pytest.fixture
def calls(nursery: Nursery, tmp_path: Path, fresh: Callable[[], Path]) -> Counter[str]:
    """How often a save makes each system call."""
    if shutil.which("strace") is None:
        pytest.skip("there is no strace here to inject faults with")
    log = tmp_path / "log"
    with traced(nursery, fresh(), "-o", str(log)):
        assert nursery.exit_code() == 0
    counted = calls_in(log)
    for name in NOT_OF_THE_SAVE:
        del counted[name]
    assert counted["fsync"] == 6 and counted["rename"] == 2, "three files, manifest, directory, parent; one removed"
    return counted


@pytest.mark.timeout(180)
def test_killed_at_every_system_call_of_a_save(
    nursery: Nursery, fresh: Callable[[], Path], calls: Counter[str], tmp_path: Path
) -> None:
    """F22. The interpreter makes a call more or less from save to save: what was never made could not kill."""
    log, reached = tmp_path / "log", 0
    outcomes: Counter[int] = Counter()
    for name, count in calls.items():
        for number in range(1, count + 1):
            directory = fresh()
            with traced(nursery, directory, "-o", str(log), "-e", f"inject={name}:signal=KILL:when={number}"):
                killed = nursery.exit_code() == -signal.SIGKILL
            assert killed or calls_in(log)[name] < number, (name, number)
            reached += killed
            outcomes[newest(directory)] += 1
            if name in ("fsync", "rename", "rmdir"):
                check_goes_on(directory)
    assert outcomes.keys() == {OLD, NEW}
    assert reached > 0.9 * sum(calls.values()) > 50


@pytest.mark.parametrize(
    ("call", "error"), [("write", "ENOSPC"), ("fsync", "EIO"), ("rename", "EIO"), ("mkdir", "EROFS")]
)
def test_an_error_of_any_call_is_told_and_leaves_nothing(
    nursery: Nursery, fresh: Callable[[], Path], calls: Counter[str], call: str, error: str
) -> None:
    """F20 and F21."""
    for number in range(1, calls[call] + 1):
        directory = fresh()
        with traced(nursery, directory, "-o", "/dev/null", "-e", f"inject={call}:error={error}:when={number}"):
            code = nursery.exit_code()
        assert all(snapshots.NAME.match(name) for name in names(directory))
        if (call, number) == ("rename", 2):  # of the one that is removed: the save itself was good
            assert (code, newest(directory)) == (0, NEW)
        elif (call, number) == ("fsync", 6):  # of the parent: whole, but nobody may say that it is on disk
            assert (code, newest(directory)) == (9, NEW)
        else:
            assert (code, newest(directory)) == (9, OLD)
            assert names(directory) == ["step-00000005", "step-00000010"]


# Disks that are full or cannot be written, for real.


def save_beyond_limit(directory: str) -> None:
    checkpointer = Checkpointer(directory, asynchronous=False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    problem = checkpointer.save(NEW, **state(NEW)).problem
    assert isinstance(problem, NotSaved) and "File too large" in str(problem), problem
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert checkpointer.save(NEW + 1, **state(NEW + 1)).problem is None


def test_a_file_that_may_not_grow(nursery: Nursery, fresh: Callable[[], Path]) -> None:
    directory = fresh()
    assert nursery.run(save_beyond_limit, str(directory)) == 0
    assert newest(directory) == NEW + 1
    assert names(directory) == ["step-00000010", "step-00000021"]


NOT_ALLOWED = 77
CLONE_NEWNS, MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x20000, 1, 32, 0x1000, 0x4000, 1 << 18


def on_small_disk(directory: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(flags: int, options: bytes, target: str, kind: bytes = b"tmpfs", source: str = "none") -> None:
        if libc.mount(source.encode(), target.encode(), kind, ctypes.c_ulong(flags), options):
            if (number := ctypes.get_errno()) in (errno.EPERM, errno.EACCES):
                os._exit(NOT_ALLOWED)
            raise OSError(number, f"{os.strerror(number)}: mount on {target}")

    if libc.unshare(CLONE_NEWNS):
        os._exit(NOT_ALLOWED)
    mount(MS_REC | MS_PRIVATE, b"", "/", b"none")
    mount(0, b"size=300k", directory)
    checkpointer = Checkpointer(directory, asynchronous=False)
    assert checkpointer.save(OLD, **state(OLD)).problem is None
    problem = checkpointer.save(NEW, **state(NEW), ballast=torch.zeros(100_000)).problem
    assert problem is not None and "No space left" in str(problem) and "step-00000010" in str(problem), problem
    assert names(Path(directory)) == ["step-00000010"]
    assert newest(Path(directory)) == OLD
    assert checkpointer.save(NEW, **state(NEW)).problem is None, "there is room for this one"
    # Not the same mount: whoever saves holds a lock there, and the kernel makes nothing read-only that is open.
    read_only = f"{directory}-read-only"
    Path(read_only).mkdir()
    mount(MS_BIND, b"", read_only, b"none", directory)
    mount(MS_REMOUNT | MS_BIND | MS_RDONLY, b"", read_only, b"none")
    problem = Checkpointer(read_only, asynchronous=False).save(NEW + 1, **state(NEW + 1)).problem
    assert problem is not None and "Read-only" in str(problem), problem
    assert newest(Path(read_only)) == NEW


def test_a_disk_that_is_full_and_one_that_is_read_only(nursery: Nursery, tmp_path: Path) -> None:
    """F20."""
    code = nursery.run(on_small_disk, str(tmp_path))
    if code == NOT_ALLOWED:
        pytest.skip("a file system cannot be mounted here")
    assert code == 0


# Ends of the process while a thread writes.


def exit_while_writing(directory: str) -> None:
    Checkpointer(directory).save(NEW, **state(NEW))
    raise SystemExit(0)


def raise_while_writing(directory: str) -> None:
    Checkpointer(directory).save(NEW, **state(NEW))
    sys.stderr.close()
    raise ValueError("in training")


def killed_while_writing(directory: str) -> None:
    Checkpointer(directory).save(NEW, **state(NEW))
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("task", "code"), [(exit_while_writing, 0), (raise_while_writing, 1), (killed_while_writing, -signal.SIGTERM)]
)
def test_an_end_while_writing_leaves_a_whole_snapshot_or_none(
    nursery: Nursery, fresh: Callable[[], Path], task: Callable[..., Any], code: int
) -> None:
    directory = fresh()
    assert nursery.run(task, str(directory)) == code
    assert newest(directory) == NEW or code < 0
    check_goes_on(directory)


# Two ranks that write one snapshot together, by files alone.

BOTH = (0, 1)


def joint_of(directory: Path, rank: int) -> JointWrite:
    home = directory / f".step-{NEW:08d}.new-{1:016x}"
    made = JointWrite(home, BOTH, rank)
    made.enter()
    return made


def fields() -> Manifest:
    return Manifest(NEW, 3, 1, 2, {}, {}, manifest.versions(), ranks=BOTH)


def write_as_member(directory: str, stop: int) -> None:
    member = joint_of(Path(directory), 1)
    (Path(directory).parent / "entered").touch()
    kill_before_call(stop)
    write_part({"state-00001.safetensors": [b"y" * 5000], "c": [b"z"]}, lambda: None, member)


def write_as_lead(directory: str, stop: int) -> None:
    lead = joint_of(Path(directory), 0)
    kill_before_call(stop)
    write_snapshot(Path(directory), fields(), {"a": [b"x" * 5000]}, joint=lead)


def wait_until_entered(directory: Path) -> None:
    """As in a job, where all have entered before any of them is waited for."""
    while not (entered := directory.parent / "entered").exists():
        time.sleep(0.001)
    entered.unlink()


def kill_before_call(stop: int) -> None:
    calls = 0

    def kill_before(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if calls == stop:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
        return call(*args, **kwargs)

    for name in ("mkdir", "open", "pwrite", "fsync", "close", "unlink", "rename"):
        setattr(os, name, partial(kill_before, getattr(os, name)))


def test_a_rank_killed_at_any_stage_of_its_part_leaves_no_snapshot(nursery: Nursery, fresh: Callable[[], Path]) -> None:
    killed = 0
    for stop in range(50):
        directory = fresh()
        lead = joint_of(directory, 0)
        nursery.fork(write_as_member, str(directory), stop)
        wait_until_entered(directory)
        problem = ""
        try:
            written = write_snapshot(directory, fields(), {"a": [b"x" * 5000]}, joint=lead)
        except CheckpointError as error:
            problem = str(error)
        assert nursery.exit_code() in (0, -signal.SIGKILL)
        found = snapshots.survey(directory)[0][0]
        if problem:
            killed += 1
            assert problem == "rank 1 could not write its part: it ended while it was writing"
            assert found.step == OLD and names(directory) == ["step-00000005", "step-00000010"]
        else:
            assert found == written and set(found.manifest.files) == {"a", "state-00001.safetensors", "c"}
            assert sorted(path.name for path in found.path.iterdir()) == [
                "a",
                "c",
                "manifest.json",
                "state-00001.safetensors",
            ]
        if not problem and stop > killed + 3:
            break
    assert killed >= 3, "two files that are synced, and the record"


def test_the_rank_that_completes_it_killed_at_any_stage(nursery: Nursery, fresh: Callable[[], Path]) -> None:
    outcomes = []
    for stop in range(50):
        directory = fresh()
        member = joint_of(directory, 1)
        write_part({"b": [b"y" * 5000]}, lambda: None, member)  # before: how often it looks is not to count
        code = nursery.run(write_as_lead, str(directory), stop)
        whole, broken = snapshots.survey(directory)
        assert not broken
        for snapshot in whole:
            opened = OpenSnapshot(snapshot)
            opened.verify(opened.chunks())
        assert {OLDER, OLD} <= {snapshot.step for snapshot in whole}
        outcomes.append(whole[0].step)
        snapshots.remove_abandoned(directory)
        assert all(snapshots.NAME.match(name) for name in names(directory))
        if code == 0:
            break
    assert code == 0 and outcomes == sorted(outcomes) and len(outcomes) > 8
    assert {OLD, NEW} == set(outcomes)


def fail_as_member(directory: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
    try:
        write_as_member(directory, -1)
    except OSError:
        os._exit(3)


def test_a_disk_that_fails_on_one_rank_is_told_by_the_one_that_completes(
    nursery: Nursery, fresh: Callable[[], Path]
) -> None:
    directory = fresh()
    lead = joint_of(directory, 0)
    nursery.fork(fail_as_member, str(directory))
    wait_until_entered(directory)
    with pytest.raises(CheckpointError, match="rank 1 could not write its part: OSError: .*File too large"):
        write_snapshot(directory, fields(), {"a": [b"x"]}, joint=lead)
    assert nursery.exit_code() == 3
    assert names(directory) == ["step-00000005", "step-00000010"]


def test_where_files_cannot_be_locked_a_rank_that_writes_nothing_is_given_up(
    fresh: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joint, "_lock", lambda _: False)
    monkeypatch.setattr(joint, "STALLED_S", 0.1)
    directory = fresh()
    lead, member = joint_of(directory, 0), joint_of(directory, 1)
    with closing(member), pytest.raises(CheckpointError, match="rank 1 has written nothing for 0 s"):
        write_snapshot(directory, fields(), {"a": [b"x"]}, joint=lead)
    assert names(directory) == ["step-00000005", "step-00000010"]
