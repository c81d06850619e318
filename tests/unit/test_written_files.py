"""Who may read the files that paceline writes, and where a link in the place of one leads: nowhere."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.agree.capsule import Capsule, write_capsule
from paceline.checkpoint.joint import JointWrite
from paceline.data.cursor import Cursor
from paceline.data.sample_log import SampleLog
from paceline.launch.rank_slot import RankLog
from paceline.stored.directory import LOCK, DirectoryLock, open_to_write, replace_file, write_file


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o002)
    yield
    os.umask(before)


def mode_of(path: Path) -> str:
    return oct(path.stat().st_mode & 0o777)


def test_what_may_hold_secrets_is_the_users_alone(tmp_path: Path) -> None:
    log = RankLog(tmp_path / "rank_0.log", again=False, note=print)
    log.close()
    samples = SampleLog(tmp_path / "samples")
    samples.begin(Cursor(0, 0, 0), 0, 1, resumed=False)
    samples.close()
    write_capsule(tmp_path / "capsule", Capsule("crash", 1, (), "boom"))
    joint = JointWrite(tmp_path / "joint", [0, 1], 0)
    joint.enter()
    joint.close()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 4
    assert {mode_of(path) for path in written} == {"0o600"}


def test_what_others_may_need_follows_the_umask(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", [b"x"])
    replace_file(tmp_path / "manifest.json", [b"x"])
    assert {mode_of(path) for path in tmp_path.iterdir()} == {"0o664"}


def test_a_lock_is_for_those_who_may_write_to_the_directory(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    assert lock.acquire() == ""
    lock.release()
    assert mode_of(tmp_path / LOCK) == "0o660"


def test_links_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("it stays")
    link = tmp_path / "link"
    link.symlink_to(precious)
    for how in ({}, {"append": True}, {"new": True}):
        with pytest.raises(OSError, match="link"):
            open_to_write(link, **how)
    with pytest.raises(FileExistsError):
        write_file(link, [b"x"])
    replace_file(link, [b"x"])  # the link is replaced, not what it leads to
    assert precious.read_text() == "it stays"


def test_a_log_whose_disk_is_full_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    log = RankLog(Path("/dev/full"), again=False, note=told.append)
    log.write(b"x")
    log.write(b"y")
    assert told == ["/dev/full is no longer written: No space left on device"]
