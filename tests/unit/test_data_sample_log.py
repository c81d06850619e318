"""The sample log, and with it the proof that every sample is trained on exactly once, whatever happens to the run."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from paceline.data import Cursor, Loader, SampleLog, SampleLogDamaged, SampleLogEntry, read_sample_log
from paceline.errors import IllegalMove, UsageError
from tests.unit.test_data_stream import Count
from tests.unit.test_sampler import Numbers


class Life:
    """One start of a run: `size` ranks that train in step, from the newest checkpoint."""

    def __init__(self, data: Dataset[int], folder: Path, size: int, batch_size: int, state: dict[str, Any]) -> None:
        self.loaders: list[Loader[Any]] = [
            Loader(data, batch_size, rank=rank, world_size=size, drop_last=False, sample_log=folder, manual_commit=True)
            for rank in range(size)
        ]
        for loader in self.loaders:
            if state:
                loader.load_state_dict(state)
        self.running = [loader.endless() for loader in self.loaders]
        self.state = state

    def train(self, steps: int, accumulate: int, save_every: int, epochs: int) -> dict[str, Any]:
        """So many steps, or until the epochs are over; then it crashes. What was saved last."""
        for step in range(1, steps + 1):
            for _ in range(accumulate):
                self._micro()
            for loader in self.loaders:
                loader.commit()
            if step % save_every == 0:
                # In the tail of an epoch some ranks have nothing left; rank 0 always has what there is.
                self.state = json.loads(json.dumps(self.loaders[0].state_dict()))
            if self.loaders[0].cursor.epoch >= epochs:
                break
        return self.state

    def _micro(self) -> None:
        epoch = self.loaders[0].epoch
        next(self.running[0])
        epoch = max(epoch, self.loaders[0].epoch)
        for loader, batches in zip(self.loaders[1:], self.running[1:], strict=True):
            if loader.epoch < epoch or loader.left:
                next(batches)


lives = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 8), st.integers(1, 3), st.integers(1, 3)), max_size=5
)


@settings(max_examples=60)
@given(length=st.integers(5, 70), lives=lives, streamed=st.booleans())
def test_every_sample_exactly_once_across_crashes_resizes_and_uneven_tails(
    length: int, lives: list[tuple[int, int, int, int, int]], streamed: bool
) -> None:
    data = Count(length) if streamed else Numbers(length)
    with TemporaryDirectory() as name:
        folder, state = Path(name), dict[str, Any]()
        for size, batch_size, steps, accumulate, save_every in [*lives, (2, 3, 10**6, 1, 1)]:
            life = Life(data, folder, 1 if streamed else size, batch_size, state)
            state = life.train(steps, accumulate, save_every, epochs=2)
        reading = read_sample_log(folder)
        assert reading.problems() == []
        for epoch in range(2):
            assert reading.counts(epoch) == dict.fromkeys(range(length), 1)
        # Steps were redone exactly where a life ended without having saved.
        assert all(entry.session < reading.sessions[-1].number for entry in reading.undone)


def entry(start: int, stop: int, *ids: int, rank: int = 0, step: int = 1) -> SampleLogEntry:
    return SampleLogEntry(step, rank, 0, start, stop, ids)


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([entry(0, 2, 0, 1), entry(4, 6, 4, 5)], "no rank trained on positions 2 to 3"),
        ([entry(0, 4, 0, 1, 2, 3), entry(2, 6, 4, 5, 6, 7)], "positions 2 to 3 of its order were used twice"),
        ([entry(0, 4, 0, 1)], "positions 0 to 3 hold 4 samples, ranks took 2"),
        ([entry(0, 4, 0, 1), entry(0, 4, 1, 2, rank=1)], "1 samples were trained on more than once, the first is 1"),
    ],
)
def test_what_contradicts_exactly_once_is_said(entries: list[SampleLogEntry], problem: str, tmp_path: Path) -> None:
    for rank in {found.rank for found in entries}:
        with SampleLog(tmp_path) as log:
            log.begin(Cursor(), rank, 2, resumed=True)
            for found in entries:
                if found.rank == rank:
                    log.record(found)
    problems = read_sample_log(tmp_path).problems()
    assert len(problems) == 1
    assert problem in problems[0]


def test_ranks_of_one_start_find_each_other_and_a_resume_undoes(tmp_path: Path) -> None:
    for rank in range(2):
        with SampleLog(tmp_path) as log:
            log.begin(Cursor(), rank, 2, resumed=True)
            log.record(entry(0, 4, *range(rank, 4, 2), rank=rank))
            log.record(entry(4, 8, *range(4 + rank, 8, 2), rank=rank))
    with SampleLog(tmp_path) as log:
        log.begin(Cursor(committed=4), 0, 1, resumed=True)
        log.record(entry(4, 8, 4, 5, 6, 7))
    reading = read_sample_log(tmp_path)
    assert [(session.number, session.world_size) for session in reading.sessions] == [(1, 2), (2, 1)]
    assert [(found.start, found.rank, found.session) for found in reading.entries] == [(0, 0, 1), (0, 1, 1), (4, 0, 2)]
    assert [found.start for found in reading.undone] == [4, 4]
    assert reading.problems() == []


def test_a_line_that_a_crash_cut_off_is_told_and_left_out(tmp_path: Path) -> None:
    with SampleLog(tmp_path) as log:
        log.begin(Cursor(), 0, 1, resumed=True)
        log.record(entry(0, 1, 0))
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes() + b'{"step":2,"ra')
    reading = read_sample_log(tmp_path)
    assert reading.torn == [file]
    assert len(reading.entries) == 1


def test_accumulated_batches_are_one_line(tmp_path: Path) -> None:
    loader: Loader[Any] = Loader(
        Numbers(10), 2, shuffle=False, rank=0, world_size=1, sample_log=tmp_path, manual_commit=True
    )
    for number, _ in enumerate(loader, start=1):
        if number in (2, 5):
            loader.commit(step=10 * number)
    assert [(found.step, found.ids) for found in read_sample_log(tmp_path).entries] == [
        (20, (0, 1, 2, 3)),
        (50, (4, 5, 6, 7, 8, 9)),
    ]
    lines = next(tmp_path.iterdir()).read_text().splitlines()
    assert json.loads(lines[1]) == {"step": 20, "rank": 0, "epoch": 0, "start": 0, "stop": 4, "ids": [0, 1, 2, 3]}


def test_a_jump_to_another_epoch_undoes_nothing(tmp_path: Path) -> None:
    loader: Loader[Any] = Loader(Numbers(4), 2, rank=0, world_size=1, sample_log=tmp_path)
    list(loader)
    list(loader)
    loader.set_epoch(0)
    list(loader)
    reading = read_sample_log(tmp_path)
    assert (len(reading.sessions), len(reading.undone)) == (2, 0)
    assert reading.counts(0) == dict.fromkeys(range(4), 2)


def test_what_is_no_sample_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="which is not a folder"):
        read_sample_log(tmp_path / "nowhere")
    with pytest.raises(IllegalMove, match=r"call begin\(\) before record\(\)"):
        SampleLog(tmp_path).record(entry(0, 1, 0))
    (tmp_path / "session-000001-rank-00000.jsonl").write_text("hello\n")
    with pytest.raises(SampleLogDamaged, match="expected a line of a sample log as JSON"):
        read_sample_log(tmp_path)
    (tmp_path / "session-000001-rank-00000.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(SampleLogDamaged, match="expected the header of a session"):
        read_sample_log(tmp_path)


def test_two_writers_of_one_rank_are_refused(tmp_path: Path) -> None:
    with SampleLog(tmp_path) as first, SampleLog(tmp_path) as second:
        first.begin(Cursor(), 0, 1, session=1, resumed=True)
        with pytest.raises(SampleLogDamaged, match="another process writes this sample log as rank 0"):
            second.begin(Cursor(), 0, 1, session=1, resumed=True)
