"""Snapshots on disk: every change of a byte is seen, and nothing is removed before something newer is whole."""

import errno
import hashlib
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import manifest, snapshots
from paceline.checkpoint.checkpoint_errors import Damaged
from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.open_snapshot import OpenSnapshot
from paceline.checkpoint.retention import Keep, remove_older
from paceline.checkpoint.snapshots import Snapshot, read, survey
from paceline.checkpoint.writer import Parts, write_snapshot
from paceline.stored.directory import CHUNK, FileRecord, write_file

FILES: dict[str, Parts] = {
    "model.safetensors": [b"head", memoryview(bytes(range(256)) * 40)],
    "state.json": [b"{}"],
    "empty": [b""],
}


def make(directory: Path, step: int, number: int) -> Snapshot:
    model = {"weight": ("float32", (2, 3))}
    return write_snapshot(directory, Manifest(step, number, 7, 1, {}, model, manifest.versions()), FILES)


def verify(snapshot: Snapshot) -> None:
    opened = OpenSnapshot(snapshot)
    opened.verify(opened.chunks())


def is_whole(path: Path) -> bool:
    try:
        verify(read(path))
    except Damaged:
        return False
    return True


def test_a_snapshot_is_what_was_written(tmp_path: Path) -> None:
    made = make(tmp_path / "new" / "place", 50, 1)
    assert made.path.name == "step-00000050"
    assert read(made.path) == made
    opened = OpenSnapshot(made)
    opened.verify(opened.chunks())
    assert opened.content("model.safetensors") == b"head" + bytes(range(256)) * 40
    assert [entry.name for entry in made.path.parent.iterdir()] == ["step-00000050"]


def test_large_files_have_a_hash_for_every_chunk(tmp_path: Path) -> None:
    whole = bytes(range(251)) * (2 * CHUNK // 250)
    record = write_file(tmp_path / "file", [whole[:5], memoryview(whole[5:])])
    chunks = [whole[at : at + CHUNK] for at in range(0, len(whole), CHUNK)]
    assert (record.size, record.chunk) == (len(whole), CHUNK)
    assert record.sha256 == tuple(hashlib.sha256(chunk).hexdigest() for chunk in chunks) and len(chunks) == 3
    assert write_file(tmp_path / "even", [whole[:CHUNK]]).sha256 == record.sha256[:1]


def test_every_part_is_verified_by_someone(tmp_path: Path) -> None:
    made = write_snapshot(tmp_path, Manifest(1, 1, 7, 1, {}, {}, {}), {"a": [bytes(5 * CHUNK + 1)], "b": [b"x"]})
    for name, at in (("a", 0), ("a", 3 * CHUNK), ("a", 5 * CHUNK), ("b", 0)):
        whole = (made.path / name).read_bytes()
        (made.path / name).write_bytes(whole[:at] + b"!" + whole[at + 1 :])
        found = []
        for part in range(3):
            try:
                opened = OpenSnapshot(made)
                opened.verify(opened.chunks()[part::3], threads=2)
            except Damaged as error:
                found.append(error.why)
        assert len(found) == 1 and name in found[0]
        (made.path / name).write_bytes(whole)


def test_a_manifest_has_a_hash_for_every_chunk() -> None:
    fields = Manifest(1, 1, 1, 1, {"a": FileRecord(9, 4, ("0",))}, {}, {})
    with pytest.raises(ValueError, match="1 hashes of chunks of 4 bytes for 9 bytes"):
        manifest.from_bytes(manifest.to_bytes(fields))


def test_1000_of_1000_flipped_bits_are_seen(tmp_path: Path) -> None:
    made = make(tmp_path, 1, 1)
    rng = random.Random(0)
    files = [file for file in made.path.iterdir() if file.stat().st_size]
    refused = 0
    for _ in range(1000):
        file = rng.choice(files)
        whole = file.read_bytes()
        at = rng.randrange(8 * len(whole))
        flipped = bytearray(whole)
        flipped[at // 8] ^= 1 << at % 8
        file.write_bytes(flipped)
        refused += not is_whole(made.path)
        file.write_bytes(whole)
    assert refused == 1000
    assert is_whole(made.path)


def test_every_single_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    raw = (make(tmp_path, 1, 1).path / "manifest.json").read_bytes()
    for at in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(ValueError, match="hash"):
            manifest.from_bytes(bytes(flipped))


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["half", "zero", "longer", "missing", "link", "folder", "fifo", "swapped"])
def test_what_is_not_the_file_that_was_written_is_refused(tmp_path: Path, name: str, how: str) -> None:
    made = make(tmp_path, 1, 1)
    file = made.path / name
    whole = file.read_bytes()
    if how in ("half", "zero"):
        os.truncate(file, len(whole) // 2 if how == "half" else 0)
    elif how == "longer":
        file.write_bytes(whole + b"\n")
    else:
        file.unlink()
    if how == "link":
        (tmp_path / "elsewhere").write_bytes(whole)
        file.symlink_to(tmp_path / "elsewhere")
    elif how == "folder":
        file.mkdir()
    elif how == "fifo":
        os.mkfifo(file)
    elif how == "swapped":
        shutil.copy(make(tmp_path, 2, 2).path / "empty", file)
    with pytest.raises(Damaged) as caught:
        verify(read(made.path))
    assert caught.value.path == made.path
    assert name in caught.value.why


def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    made = make(tmp_path, 1, 1)
    fields = Manifest(1, 1, 1, 1, {"../secret": made.manifest.files["empty"]}, {}, {})
    (made.path / "manifest.json").write_bytes(manifest.to_bytes(fields))
    with pytest.raises(Damaged, match="outside"):
        read(made.path)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    first, second, third = make(tmp_path, 5, 1), make(tmp_path, 5, 2), make(tmp_path, 5, 3)
    assert [one.path.name for one in (first, second, third)] == ["step-00000005", "step-00000005.1", "step-00000005.2"]
    assert [one.path for one in survey(tmp_path)[0]] == [third.path, second.path, first.path]
    gone = remove_older(tmp_path, Keep(2), [])
    assert set(gone) == {first.path, second.path}, "copies of a step do not count as snapshots"


def test_the_newest_whole_ones_are_kept(tmp_path: Path) -> None:
    made = [make(tmp_path, step, number) for number, step in enumerate((10, 20, 30, 40), start=1)]
    os.truncate(made[3].path / "model.safetensors", 3)
    assert remove_older(tmp_path, Keep(2), [made[2].path]) == [], "two are damaged: nothing can go"
    newer = make(tmp_path, 50, 5)
    gone = remove_older(tmp_path, Keep(2), [made[2].path])
    assert gone == [made[0].path]
    assert {one.path for one in survey(tmp_path)[0]} == {newer.path, made[3].path, made[2].path, made[1].path}
    make(tmp_path, 60, 6)
    remove_older(tmp_path, Keep(2), [made[2].path])
    assert {one.step for one in survey(tmp_path)[0]} == {50, 60}


def test_a_run_that_went_back_is_newer_than_what_it_left_behind(tmp_path: Path) -> None:
    make(tmp_path, 50, 1)
    make(tmp_path, 100, 2)
    make(tmp_path, 60, 3)
    assert [one.step for one in survey(tmp_path)[0]] == [60, 100, 50]
    remove_older(tmp_path, Keep(2), [])
    assert [one.step for one in survey(tmp_path)[0]] == [60, 100]


def test_broken_manifests_go_when_newer_ones_are_whole(tmp_path: Path) -> None:
    made = [make(tmp_path, step, number) for number, step in enumerate((10, 20), start=1)]
    for one in made:
        (one.path / "manifest.json").write_bytes(b"{}")
    make(tmp_path, 15, 3)
    make(tmp_path, 16, 4)
    gone = remove_older(tmp_path, Keep(2), [])
    assert [path.name for path in gone] == ["step-00000010"], "of the other nobody knows whether it is older"


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_writes_is_not(tmp_path: Path) -> None:
    left = snapshots.temporary(tmp_path, "step-00000001", "new")
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    alive = snapshots.temporary(tmp_path, "step-00000002", "new")
    alive.mkdir()
    (tmp_path / ".step-notes").mkdir()
    with snapshots.held(alive):
        assert snapshots.remove_abandoned(tmp_path) == [left]
        assert alive.is_dir()
    assert snapshots.remove_abandoned(tmp_path) == [alive]
    assert [entry.name for entry in tmp_path.iterdir()] == [".step-notes"]


def test_old_probes_are_removed_and_new_ones_are_not(tmp_path: Path) -> None:
    for name in (".seen-5f-0", ".seen-5f-1"):
        (tmp_path / name).touch()
    os.utime(tmp_path / ".seen-5f-0", (1, 1))
    (tmp_path / ".seen-5f-2").symlink_to("nowhere")  # as one that goes away while it is looked at
    assert snapshots.remove_abandoned(tmp_path) == [tmp_path / ".seen-5f-0"]


def test_an_error_at_any_stage_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 1, 1)
    countdown = [0]

    def fail_in_turn(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise OSError(errno.EIO, "Input/output error")
        return call(*args, **kwargs)

    for name in ("mkdir", "fsync", "rename"):
        monkeypatch.setattr(os, name, partial(fail_in_turn, getattr(os, name)))
    for stop in range(1, 8):  # mkdir, three files, manifest, directory, rename
        countdown[0] = stop
        with pytest.raises(OSError, match="Input/output"):
            make(tmp_path, 2, 2)
        assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]
    assert make(tmp_path, 2, 2).path.is_dir()


def test_a_file_that_exists_is_never_opened(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "file", [b"x"])
    assert not (tmp_path / "target").exists()
