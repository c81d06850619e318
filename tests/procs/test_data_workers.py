"""Workers of a Loader that die, freeze or fail are named, and the loader continues at the same place afterwards."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from paceline.data import Loader, WorkerDied, order, read_sample_log, workers
from tests.pool import Pool
from tests.unit.test_data_loader import Dice
from tests.unit.test_data_stream import MANY_THREADS, Count
from tests.unit.test_sampler import Numbers

pytestmark = pytest.mark.filterwarnings(MANY_THREADS)


class Deadly(Numbers):
    """Fetching sample `at` ends the worker, as often as there are files in `folder`."""

    def __init__(self, length: int, at: int, end: Callable[[], Any], folder: Path | None = None) -> None:
        super().__init__(length)
        self.at = at
        self.end = end
        self.folder = folder

    def __getitem__(self, index: int) -> int:
        if index == self.at and get_worker_info() is not None:
            left = None if self.folder is None else next(self.folder.iterdir(), None)
            if self.folder is None or left is not None:
                if left is not None:
                    left.unlink()
                self.end()
        return index


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leave() -> None:
    os._exit(7)


def with_workers(data: Any, **more: Any) -> Loader[torch.Tensor]:
    return Loader(data, 4, **{"rank": 0, "world_size": 1, "num_workers": 2, **more})


def flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch.tolist()]


def worker_pids() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def kill(pid: int) -> None:
    """Returns when it is dead and its parent has been told."""
    watched = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    wait([watched])
    os.close(watched)


def until_death(loader: Any, match: str = "was killed by SIGKILL") -> Iterator[Any]:
    """The batches before a worker dies."""
    try:
        yield from loader
    except WorkerDied as error:  # not kept, as pytest would: its frames would keep the workers
        assert re.search(match, str(error))
    else:
        pytest.fail("no worker died")


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_deliver_what_one_process_would(persistent: bool) -> None:
    ours = with_workers(Numbers(42), drop_last=False, persistent_workers=persistent)
    for epoch in range(2):
        assert flat(ours) == order(0, epoch, 42).tolist()
    first = next(iter(ours))
    # Several more batches lie ready, and only this one counts.
    assert ours.cursor.committed == 4
    assert flat([first, *ours]) == order(0, 2, 42).tolist()


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_continues_at_the_same_place_after_a_worker_was_killed(tmp_path: Path, persistent: bool) -> None:
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    (deaths / "once").touch()
    data = Deadly(40, 17, kill_self, deaths)
    ours = with_workers(data, sample_log=tmp_path / "sample_log", persistent_workers=persistent)
    first = list(until_death(ours))
    assert flat([*first, *ours]) == order(0, 0, 40).tolist()
    assert flat(ours) == order(0, 1, 40).tolist()
    reading = read_sample_log(tmp_path / "sample_log")
    assert reading.problems() == []
    assert reading.counts(0) == dict.fromkeys(range(40), 1)


def test_a_death_while_the_loop_computes_is_raised_at_the_next_batch() -> None:
    strangers = set(worker_pids())
    ours = with_workers(Numbers(400))
    seen: list[int] = []

    def loop() -> None:
        for number, batch in enumerate(ours):
            seen.extend(batch.tolist())
            if number == 5:
                (victim, *_) = set(worker_pids()) - strangers
                kill(victim)  # with torch alone, this line raises
                seen.append(-1)

    with pytest.raises(WorkerDied, match=r"was killed by SIGKILL while loading \d+ samples between indices"):
        loop()
    assert seen.pop(24) == -1
    assert seen == order(0, 0, 400)[: len(seen)].tolist()


KILLED = """
import multiprocessing, sys, torch, paceline

if __name__ == "__main__":
    data = list(torch.arange(64.0))
    more = {"multiprocessing_context": sys.argv[1], "num_workers": 2}
    batches = iter(paceline.Loader(data, 4, rank=0, world_size=1, **more))
    next(batches)  # through a socket in a temporary folder
    for worker in multiprocessing.active_children():
        worker.kill()
    try:
        list(batches)
    except paceline.data.WorkerDied as error:
        print(error)
"""


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_killed_workers_leave_no_files(tmp_path: Path, context: str) -> None:
    (script := tmp_path / "script.py").write_text(KILLED)
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:  # the path of a socket may have 107 characters
        environ = os.environ | {"TMPDIR": temporary, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), context]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=50, check=True)
        assert "was killed by SIGKILL" in done.stdout
        assert [path.name for path in Path(temporary).iterdir()] == []


class Long(Numbers):
    """Samples that do not fit into a pipe."""

    def __getitem__(self, index: int) -> Any:
        return bytes(1 << 20)


def test_a_worker_that_dies_in_the_middle_of_a_message_ends_the_wait() -> None:
    strangers, started = set(worker_pids()), 0.0
    ours: Loader[Any] = with_workers(Long(400), collate_fn=list, num_workers=1)
    for number, _ in enumerate(until_death(ours)):
        if number == 1:
            (victim,) = set(worker_pids()) - strangers
            kill(victim)
            started = time.monotonic()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_that_is_left_after_a_death_can_be_entered_again(persistent: bool) -> None:
    strangers = set(worker_pids())
    ours = with_workers(Numbers(40), persistent_workers=persistent)
    first = []
    for batch in ours:
        first.append(batch)
        (victim, *_) = set(worker_pids()) - strangers
        kill(victim)
        break
    try:  # whether the death was noticed before the loop was left is a matter of time
        first.append(next(iter(ours)))
    except WorkerDied:
        assert persistent
    assert flat([*first, *ours]) == order(0, 0, 40).tolist()


def test_an_abandoned_loop_that_ends_late_does_not_disturb_the_next() -> None:
    ours = with_workers(Numbers(40))
    abandoned = iter(ours)
    first = next(abandoned)
    rest = iter(ours)
    second = next(rest)
    del abandoned
    assert flat([first, second, *rest]) == order(0, 0, 40).tolist()


def test_random_augmentation_is_the_same_after_a_death() -> None:
    def rolled(**more: Any) -> list[list[float]]:
        ours: Loader[list[list[float]]] = Loader(Dice(), 2, rank=0, world_size=1, collate_fn=list, **more)
        strangers, samples = set(worker_pids()), []
        for number, batch in enumerate(until_death(ours) if more else ours):
            samples += batch
            if more and number == 3:
                (victim, *_) = set(worker_pids()) - strangers
                kill(victim)
        return samples + [sample for batch in ours for sample in batch] if more else samples

    assert rolled(num_workers=2) == rolled()


@pytest.mark.parametrize(("end", "how"), [(kill_self, "was killed by SIGKILL"), (leave, "exited with code 7")])
def test_a_sample_that_always_kills_its_worker_is_an_error_that_names_it(end: Callable[[], Any], how: str) -> None:
    ours = with_workers(Deadly(40, 17, end), shuffle=False)
    seen: list[int] = []

    def loop() -> None:
        for batch in ours:
            seen.extend(batch.tolist())

    for _ in range(2):
        with pytest.raises(WorkerDied) as caught:
            loop()
        assert seen == list(range(len(seen)))
        assert len(seen) <= 16
        message = str(caught.value)
        assert how in message
        found = re.search(
            r"rank 0: DataLoader worker [01] of 2 \(pid \d+\) .* \d+ samples between indices (\d+) and (\d+) \(",
            message,
        )
        assert found
        assert int(found[1]) <= 17 <= int(found[2])
        assert "load these samples with num_workers=0" in message
        assert ours.cursor.committed == len(seen)


def test_a_death_counts_also_when_the_loop_collected_its_code_first() -> None:
    """Two threads look at a dead worker. The one that comes second is told by the kernel that there is none, and the
    first has not yet stored what it was told."""
    worker: Any = get_context("fork").Process(target=kill_self)
    worker.start()
    wait([worker.sentinel])
    os.waitpid(worker.pid, 0)
    late = Timer(0.05, setattr, (worker._popen, "returncode", -signal.SIGKILL))
    late.start()
    assert workers.exit_code(worker) == -signal.SIGKILL
    late.join()
    worker.close()


def test_the_oom_killer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([3, 4])
    monkeypatch.setattr(workers, "oom_kills", lambda: next(counts))
    with pytest.raises(WorkerDied, match=r"\(pid \d+\) was killed by the OOM killer while loading"):
        list(with_workers(Deadly(40, 17, kill_self)))


def test_a_stopped_worker_is_named_after_the_timeout(tmp_path: Path) -> None:
    (tmp_path / "once").touch()
    ours = with_workers(Deadly(40, 17, stop_self, tmp_path), timeout=0.5, shuffle=False)
    stopped = r"\(stopped by a signal such as SIGSTOP: worker [01] \(pid \d+\)\)"
    told = rf"rank 0: the 2 DataLoader workers delivered no batch in 0.5 s {stopped} while loading 4 samples"
    first = list(until_death(ours, told))
    assert flat([*first, *ours]) == list(range(40))


def test_a_stopped_worker_is_named_without_a_timeout(tmp_path: Path) -> None:
    (tmp_path / "once").touch()
    ours = with_workers(Deadly(40, 17, stop_self, tmp_path), shuffle=False)
    told = r"the 2 DataLoader workers deliver no batch \(stopped by a signal such as SIGSTOP: worker [01] \(pid \d+\)\)"
    first = list(until_death(ours, told))
    assert flat([*first, *ours]) == list(range(40))


def test_an_error_in_a_worker_is_the_loops_and_no_death() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            raise RuntimeError("no such file")

    with pytest.raises(RuntimeError, match="no such file") as caught:
        next(iter(with_workers(Broken(8))))
    assert not isinstance(caught.value, WorkerDied)


class DeadlyStream(IterableDataset[int]):
    """A stream of 40 whose worker 1 dies once, at element 21."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Any:
        info = get_worker_info()
        for index in Count(40):
            if index == 21 and info is not None and info.id == 1 and (left := next(self.folder.iterdir(), None)):
                left.unlink()
                kill_self()
            yield index


@pytest.mark.parametrize("persistent", [False, True])
def test_a_stream_continues_after_a_death(tmp_path: Path, persistent: bool) -> None:
    (tmp_path / "once").touch()
    ours = with_workers(DeadlyStream(tmp_path), persistent_workers=persistent, prefetch_factor=1)
    first = list(until_death(ours, "while loading elements from"))
    assert flat([*first, *ours]) == list(range(40))
    assert flat(ours) == list(range(40))


def pinned(rank: int, size: int, folder: Path, persistent: bool) -> None:
    ours = with_workers(Deadly(40, 17, kill_self, folder), pin_memory=True, persistent_workers=persistent)
    batches = [*until_death(ours), *ours]
    assert all(batch.is_pinned() for batch in batches)
    assert flat(batches) == order(0, 0, 40).tolist()
    assert flat(ours) == order(0, 1, 40).tolist()
    ours.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is pinned for a CUDA device")
@pytest.mark.parametrize("persistent", [False, True])
def test_pinned_batches_continue_after_a_death(procs: Pool, tmp_path: Path, persistent: bool) -> None:
    (tmp_path / "once").touch()
    procs(1).run(pinned, tmp_path, persistent, group=False)


def spawned(rank: int, size: int) -> list[int]:
    return flat(with_workers(Numbers(16), num_workers=1, multiprocessing_context="spawn"))


def test_spawned_workers_work_too(procs: Pool) -> None:
    assert procs(1).run(spawned, group=False) == [order(0, 0, 16).tolist()]
