"""Directories: made so that they stay, and owned by one process at a time."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.stored.directory import LOCK, DirectoryLock, make_directory

HOLD = """
import os, sys
from pathlib import Path
from paceline.stored.directory import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print(lock.acquire(), flush=True)
if os.fork() == 0:
    sys.stdin.read()  # a child that outlives its parent, as a loader's worker may
    os._exit(0)
os.kill(os.getpid(), 9)
"""


def test_a_directory_is_made_with_its_parents_and_found_the_second_time(tmp_path: Path) -> None:
    make_directory(tmp_path / "a" / "b")
    make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_directory(tmp_path / "file")


def other_process_gets(directory: Path) -> str:
    script = "import sys; from pathlib import Path; from paceline.stored.directory import DirectoryLock\n"
    script += "print(DirectoryLock(Path(sys.argv[1])).acquire())"
    done = subprocess.run([sys.executable, "-c", script, str(directory)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_one_process_owns_a_directory(tmp_path: Path) -> None:
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    assert (first.acquire(), first.acquire(), second.acquire()) == ("", "", "")
    assert other_process_gets(tmp_path).startswith(f"process {os.getpid()} on ")
    first.release()
    assert other_process_gets(tmp_path).startswith(f"process {os.getpid()} on ")
    (tmp_path / LOCK).unlink()
    assert second.acquire() == ""
    assert other_process_gets(tmp_path).startswith(f"process {os.getpid()} on "), "a lock nobody can see is none"
    second.release()
    assert other_process_gets(tmp_path) == ""


def test_a_lock_ends_with_its_process_and_not_with_its_children(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.wait() == -9
        lock = DirectoryLock(tmp_path)
        assert lock.acquire() == "", "its child still lives"
        lock.release()
        assert holder.stdin is not None
        holder.stdin.close()


def test_where_files_cannot_be_locked_it_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    lock = DirectoryLock(tmp_path)
    assert (lock.acquire(), lock.acquire()) == ("", "")
    assert len(caplog.records) == 1 and "cannot be locked (No locks available)" in caplog.text
    lock.release()
    with pytest.raises(FileNotFoundError):
        DirectoryLock(tmp_path / "none").acquire()
