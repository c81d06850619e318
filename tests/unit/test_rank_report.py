"""What ranks tell their launcher, and the words that say how far they are."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paceline.launch.reports import Mark, ProgressBoard, ReportReader
from paceline.progress import Phase, Progress
from paceline.rank_report import (
    PROGRESS_NAME,
    REPORT_NAME,
    inherited_descriptor,
    inherited_progress,
    report,
)


def named(descriptor: int) -> str:
    """As the reaper names it in the environment of a rank."""
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"


@contextmanager
def told_pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    inner, outer = os.pipe()
    monkeypatch.setenv(REPORT_NAME, named(outer))
    try:
        yield inner
    finally:
        os.close(inner)
        os.close(outer)


def test_what_is_told_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    with told_pipe(monkeypatch) as inner:
        report("step", step=3, loss=float("nan"), where=os.PathLike)
        report("text", said="line one\nline two")
        (kind, fields), second = ReportReader().feed(os.read(inner, 4096))
    assert (kind, fields["step"], fields["where"]) == ("step", 3, "<class 'os.PathLike'>")
    assert second == ("text", {"said": "line one\nline two"})


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REPORT_NAME, raising=False)
    report("step", step=1)
    for nonsense in ("", "x", "7", "-1:0", "999999:1"):
        monkeypatch.setenv(REPORT_NAME, nonsense)
        report("step", step=1)


def test_another_file_under_the_same_number_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with told_pipe(monkeypatch) as inner:
        number, _, inode = os.environ[REPORT_NAME].partition(":")
        monkeypatch.setenv(REPORT_NAME, f"{number}:{int(inode) + 1}")
        report("step", step=1)
        os.set_blocking(inner, False)
        with pytest.raises(BlockingIOError):
            os.read(inner, 1)


def test_a_launcher_that_does_not_read_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with told_pipe(monkeypatch) as inner:
        began = time.monotonic()
        for _ in range(3):
            report("large", data="x" * 100_000)
        assert time.monotonic() - began < 2
        got = os.read(inner, 1 << 20)
        while len(got) < 65536:
            got += os.read(inner, 1 << 20)
        # What was cut short is dropped, and what comes after it is read again.
        reader = ReportReader()
        assert reader.feed(got) == []
        assert reader.feed(b'\n{"kind": "next"}\n') == [("next", {})]


def test_a_launcher_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, outer = os.pipe()
    monkeypatch.setenv(REPORT_NAME, named(outer))
    os.close(inner)
    report("step", step=1)
    os.close(outer)


def tell_ten(number: int) -> None:
    for _ in range(10):
        report("t", n=number, pad="x" * 500)


def test_threads_do_not_mix_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    with told_pipe(monkeypatch) as inner:
        threads = [threading.Thread(target=tell_ten, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        reader = ReportReader()
        found: list[tuple[str, dict[str, Any]]] = []
        while len(found) < 40:
            found += reader.feed(os.read(inner, 1 << 16))
        for thread in threads:
            thread.join()
    assert [sum(fields["n"] == n for _, fields in found) for n in range(4)] == [10] * 4


@pytest.mark.parametrize("junk", [b"no json\n", b"[1, 2]\n", b'{"kind": 3}\n', b"\xff\xfe\n", b"\n"])
def test_junk_is_dropped(junk: bytes) -> None:
    assert ReportReader().feed(junk + b'{"kind": "fine", "n": 1}\n') == [("fine", {"n": 1})]


def test_progress_is_seen_by_another_process() -> None:
    board = ProgressBoard(2)
    try:
        assert board.read(1) == Mark(Phase.STARTING, -1, 0.0)
        code = "from paceline.progress import *; own_progress().note(Phase.BACKWARD, 41)"
        environment = {**os.environ, PROGRESS_NAME: named(board.descriptor), "LOCAL_RANK": "1"}
        subprocess.run(
            [sys.executable, "-c", code], env=environment, pass_fds=[board.descriptor], check=True, timeout=20
        )
        mark = board.read(1)
        assert mark[:2] == (Phase.BACKWARD, 41)
        assert 0 <= time.monotonic() - mark.at < 20
        assert not board.read(0).noted
    finally:
        board.close()


def test_progress_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROGRESS_NAME, raising=False)
    Progress(inherited_progress()).note(Phase.DATA, 1)
    monkeypatch.setenv(PROGRESS_NAME, "0:1")
    monkeypatch.setenv("LOCAL_RANK", "5")
    Progress(inherited_progress()).note(Phase.DATA, 1)


def test_a_rank_beyond_the_board_writes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    board = ProgressBoard(1)
    monkeypatch.setenv(PROGRESS_NAME, named(board.descriptor))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert inherited_descriptor(named(board.descriptor)) == board.descriptor
    Progress(inherited_progress()).note(Phase.DATA, 1)
    assert not board.read(0).noted
    board.close()


def test_a_note_is_cheap() -> None:
    progress = Progress(memoryview(bytearray(64)))
    best = min(_time_of(progress) for _ in range(20))
    assert best < 2e-6


def _time_of(progress: Progress) -> float:
    began = time.perf_counter()
    for step in range(2000):
        progress.note(Phase.FORWARD, step)
    return (time.perf_counter() - began) / 2000
