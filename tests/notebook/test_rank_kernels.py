"""Ranks of a notebook, as processes: cells, interrupts, deaths, restarts, and that nothing is left of them."""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.notebook.cell_parts import pad_above
from paceline.notebook.events import Cleared, Died, Ended, Failed, Noticed, Showed
from paceline.notebook.rank_kernels import interrupt, waiting
from paceline.notebook.rank_kernels.connection import RankState
from paceline.notebook.rank_kernels.driver import RankKernels
from paceline.notebook.rank_kernels.start_options import StartOptions
from paceline.notebook.rank_kernels.startup import RankStartFailed, StartupProgress
from tests.notebook.conftest import Record, unseen
from tests.notebook.notebook import alive, gone_within

BOTH = (0, 1)
# Enough on a busy machine; what is measured is printed.
SOON_S = 5.0


def ran(kernels: RankKernels, code: str, ranks: tuple[int, ...] = BOTH, *, count: int | None = None) -> Record:
    """Run a cell that must succeed."""
    view = Record()
    outcome = kernels.run(code, ranks, view, count=count)
    assert not outcome.failures, view.traceback(outcome.failures[0].rank)
    assert not outcome.deaths and not outcome.interrupted
    return view


def told(capsys: pytest.CaptureFixture[str], what: str) -> None:
    with capsys.disabled():
        sys.stdout.write(f" [{what}] ")


def assert_group_works(kernels: RankKernels) -> None:
    view = ran(kernels, "probe = torch.ones(1) * (rank + 1); dist.all_reduce(probe); print(probe.item())")
    assert [view.text(rank) for rank in BOTH] == ["3.0\n", "3.0\n"]


# Cells -------------------------------------------------------------------------------------------------------------


def test_what_a_rank_says_arrives(kernels: RankKernels) -> None:
    view = ran(
        kernels,
        "import sys, os, time, IPython.display as shown\n"
        "print('out', rank); print('err', rank, file=sys.stderr)\n"
        "handle = shown.display(shown.HTML('<b>1</b>'), display_id='one'); handle.update(shown.HTML('<b>2</b>'))\n"
        "shown.clear_output(wait=True)\n"
        "os.write(1, b'raw\\n'); os.write(2, b'bad\\n'); os.system('echo child')\n"
        "rank * 10",
    )
    for rank in BOTH:
        # What is written to the descriptor comes another way, and may overtake.
        assert sorted(view.text(rank).splitlines()) == ["child", f"out {rank}", "raw"]
        assert sorted(view.text(rank, "stderr").splitlines()) == ["bad", f"err {rank}"]
        first, second, result = view.of(Showed, rank)
        assert (first.data["text/html"], first.display_id, first.updates) == ("<b>1</b>", "one", False)
        assert (second.data["text/html"], second.display_id, second.updates) == ("<b>2</b>", "one", True)
        assert result.data == {"text/plain": str(rank * 10)}
        assert view.of(Cleared, rank) == [Cleared(rank, waits=True)]
        assert view.of(Ended, rank) == [Ended(rank)]
    assert view.closed == 1


def test_names_that_cells_find(kernels: RankKernels) -> None:
    view = ran(
        kernels,
        "print(rank, world_size, local_rank, gpu_id, device, __rank__, __world_size__, get('rank'), dist.get_rank())\n"
        "set_seed(43); print(torch.rand(1).item(), paceline.get('ws'))",
    )
    first, other = view.text(0).splitlines(), view.text(1).splitlines()
    assert first[0] == "0 2 0 None cpu 0 2 0 0"
    assert other[0] == "1 2 1 None cpu 1 2 1 1"
    assert first[1] == other[1]


def test_errors_name_the_notebooks_lines(kernels: RankKernels) -> None:
    view = Record()
    outcome = kernels.run(pad_above("if rank == 1:\n    1 / 0", 1), BOTH, view, count=7)
    assert [(failure.rank, failure.name, failure.value) for failure in outcome.failures] == [
        (1, "ZeroDivisionError", "division by zero")
    ]
    assert "Cell In[7], line 3" in view.traceback(1)
    assert view.of(Failed) == list(outcome.failures)
    assert not outcome.interrupted and not outcome.deaths
    # Cells after an error are not refused, and IPython's own syntax works.
    view = ran(kernels, "%%time\nprint('again')", count=8)
    assert view.text(0).startswith("again\n") and "Wall time" in view.text(0)
    view = Record()
    assert (
        kernels.run(pad_above("    x = 1\n    x.nothing", 3), [0], view, count=9).failures[0].name == "AttributeError"
    )
    assert "Cell In[9], line 5" in view.traceback(0)


def test_other_ways_to_say_something(kernels: RankKernels) -> None:
    page = ran(kernels, "len?", (0,)).of(Showed, 0)
    assert "Return the number of items" in page[0].data["text/plain"]
    late = ran(kernels, "import threading; threading.Timer(0.2, lambda: print('late')).start()", (1,))
    time.sleep(0.5)
    assert "late\n" in late.text(1) + ran(kernels, "pass", (0,)).text(1)  # shown with whatever cell comes next
    assert kernels.ask(0, "complete_request", {"code": "dist.all_redu", "cursor_pos": 13}, 5.0)["matches"]  # type: ignore[index]


def test_input_is_asked_of_the_user(kernels: RankKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return f"answer {len(asked)}"

    monkeypatch.setattr("builtins.input", answer)
    view = ran(kernels, "print(input('name? ').upper())")
    assert sorted(asked) == ["[0] name? ", "[1] name? "]
    assert sorted([view.text(0), view.text(1)]) == ["ANSWER 1\n", "ANSWER 2\n"]

    def nobody(prompt: str) -> str:
        raise EOFError("no terminal")

    monkeypatch.setattr("builtins.input", nobody)
    view = Record()
    outcome = kernels.run("input()", [0], view)
    assert [failure.name for failure in outcome.failures] == ["KeyboardInterrupt"]
    assert "which cannot be given here" in view.of(Noticed)[0].text


def test_ten_megabytes(kernels: RankKernels) -> None:
    view = ran(
        kernels, "for _ in range(100_000): print('x' * 99)\nprint('the end')\nos.system('yes | head -c 3000000')"
    )
    for rank in BOTH:
        assert len(view.text(rank)) == 10_000_000 + len("the end\n") + 3_000_000
    view = ran(kernels, "for number in range(3000): shown.display(number)", (0,))
    assert [event.data["text/plain"] for event in view.of(Showed, 0)] == [str(number) for number in range(3000)]


def test_an_empty_cell_is_quick(kernels: RankKernels, capsys: pytest.CaptureFixture[str]) -> None:
    took = []
    for _ in range(40):
        began = time.perf_counter()
        ran(kernels, "")
        took.append(time.perf_counter() - began)
    told(capsys, f"an empty cell: {statistics.median(took) * 1000:.1f} ms")
    assert statistics.median(took) < SOON_S


def test_only_one_thread_at_a_time(kernels: RankKernels) -> None:
    refused: list[Exception] = []

    def ask() -> None:
        try:
            kernels.request("facts", {}, ranks=BOTH)
        except UsageError as error:
            refused.append(error)

    timer = threading.Timer(0.2, ask)
    timer.start()
    ran(kernels, "import time; time.sleep(0.5)")
    timer.join()
    assert "another cell runs on the ranks" in str(refused[0])


def test_values_and_facts(kernels: RankKernels) -> None:
    ran(kernels, "here = {'rank': rank}")
    answers = kernels.request("pull", {"name": "here"}, ranks=BOTH)
    assert sorted(answers) == [0, 1] and not answers[0].error
    missing = kernels.request("pull", {"name": "nothing"}, ranks=[1])[1]
    assert missing.error == "NameError: name 'nothing' is not defined on rank 1"
    facts = kernels.request("facts", {}, ranks=BOTH)
    assert {rank: answer.content["pid"] for rank, answer in facts.items()} == {
        found.rank: found.pid for found in kernels.ranks()
    }
    assert [(found.state, found.device, found.died) for found in kernels.ranks()] == [(RankState.IDLE, "cpu", "")] * 2


# Interrupts --------------------------------------------------------------------------------------------------------


def stop(kernels: RankKernels, code: str, capsys: pytest.CaptureFixture[str], ranks: tuple[int, ...] = (0,)) -> Record:
    """Stop a cell that blocks after it wrote "here"."""
    generation = kernels.generation
    view = Record(stop_at="here")
    outcome = kernels.run(f"print('here', flush=True)\n{code}", ranks, view)
    took = time.monotonic() - view.stopped_at
    told(capsys, f"back after {took:.2f} s")
    assert outcome.interrupted and not outcome.deaths
    assert took < SOON_S
    assert kernels.generation == generation + 1
    assert not view.of(Noticed)
    return view


BLOCKED = {
    "all_reduce": "dist.all_reduce(torch.ones(3))",
    "barrier": "dist.barrier()",
    "new group": "dist.new_group([0, 1])",
    "sleep": "time.sleep(100)",
    "child": "!sleep 100",
    "await": "import asyncio; await asyncio.sleep(100)",
    "destructor": "type('Slow', (), {'__del__': lambda self: time.sleep(100)})(); time.sleep(100)",
    "flood": "import subprocess; subprocess.run(['yes'])",
    "torch's DDP": "theirs(torch.ones(1, 3)).sum().backward()",
    "our DDP": "ours(torch.ones(1, 3)).sum().backward()",
    # Python looks for signals in a jump that may have no line number.
    "loop": "for i in range(10**12):\n    if i % 2:\n        pass",
}


@pytest.fixture(scope="module")
def replicas(kernels: RankKernels) -> None:
    ran(kernels, "import os, time; kept = torch.full((3,), float(rank))")
    ran(kernels, "ours = paceline.DistributedDataParallel(torch.nn.Linear(3, 3))")


@pytest.mark.parametrize("what", BLOCKED)
@pytest.mark.usefixtures("replicas")
def test_interrupt(kernels: RankKernels, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    if what == "torch's DDP":  # it does not outlive its group
        ran(kernels, "theirs = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))")
    view = stop(kernels, BLOCKED[what], capsys)
    assert "AssertionError" not in [event.name for event in view.of(Failed)]
    assert "Custom TB Handler failed" not in view.text(0, "stderr")
    assert_group_works(kernels)
    assert ran(kernels, "print(kept.tolist())").text(1) == "[1.0, 1.0, 1.0]\n"


@pytest.mark.usefixtures("replicas")
def test_our_replica_goes_on_after_an_interrupt(kernels: RankKernels) -> None:
    ran(kernels, "ours.zero_grad(); ours(torch.full((1, 3), float(rank))).sum().backward()")
    view = ran(kernels, "print(ours.module.weight.grad[0].tolist())")
    assert [view.text(rank) for rank in BOTH] == ["[0.5, 0.5, 0.5]\n"] * 2


@pytest.mark.usefixtures("replicas")
def test_interrupt_of_ranks_in_different_places(kernels: RankKernels, capsys: pytest.CaptureFixture[str]) -> None:
    view = stop(kernels, "dist.all_reduce(torch.ones(3)) if rank else time.sleep(100)", capsys, BOTH)
    assert [event.name for event in view.of(Failed)] == ["KeyboardInterrupt"] * 2
    assert "line 2\n----> 2 dist.all_reduce" in view.traceback(0)
    assert "torch/distributed" in view.traceback(1) and "torch/distributed" not in view.traceback(0)
    assert_group_works(kernels)


@pytest.mark.usefixtures("replicas")
def test_who_waits_for_whom_is_said(kernels: RankKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "AT_S", (0.3,))
    view = Record(stop_at="all_reduce")
    outcome = kernels.run(pad_above("\ndist.all_reduce(torch.ones(3))", 0), [0], view)
    assert outcome.interrupted
    text = view.of(Noticed)[0].text
    assert "rank 0" in text and "rank 1" in text and "line 2" in text
    assert_group_works(kernels)


def test_ranks_that_get_on_are_not_said_to_wait(kernels: RankKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "AT_S", (0.1,))
    view = Record()
    kernels.run(
        "import time\nfor _ in range(35):\n    time.sleep(0.04 * rank); dist.all_reduce(torch.ones(3))", BOTH, view
    )
    assert not view.of(Noticed)


# Deaths ------------------------------------------------------------------------------------------------------------


def test_a_rank_that_does_not_stop_is_killed_at_the_second_request(
    kernels: RankKernels, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(interrupt, "NAMED_AFTER_S", 0.3)
    monkeypatch.setattr(interrupt, "KILLED_AFTER_S", 0.6)
    ran(kernels, "import signal, time; kept = torch.full((3,), float(rank))")
    view = Record(stop_at="here")
    again = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    again.start()
    deaf = "signal.signal(signal.SIGINT, signal.SIG_IGN); print('here', flush=True); time.sleep(100)"
    outcome = kernels.run(deaf, [1], view)
    again.join()
    assert outcome.interrupted
    assert [(died.rank, died.how) for died in outcome.deaths] == [(1, "was killed by SIGKILL")]
    assert "interrupt once more" in view.of(Noticed)[0].text
    assert kernels.ranks()[1].state is RankState.DEAD
    # A cell for a dead rank is not run, on no rank.
    view = Record()
    with pytest.raises(UsageError, match="rank 1 was killed by SIGKILL: bring it back with %dist_restart 1, or run"):
        kernels.run("print('ran')", BOTH, view)
    assert not view.text(0)

    began = time.monotonic()
    kernels.restart([1], unseen)
    told(capsys, f"back in {time.monotonic() - began:.1f} s")
    assert_group_works(kernels)
    assert ran(kernels, "print(kept.tolist())", (0,)).text(0) == "[0.0, 0.0, 0.0]\n"
    assert "kept" not in ran(kernels, "print(list(globals()))", (1,)).text(1)


def test_death_while_another_rank_waits(kernels: RankKernels, capsys: pytest.CaptureFixture[str]) -> None:
    ran(kernels, "import os, signal, time")
    view = Record()
    outcome = kernels.run(
        "if rank:\n"
        "    print(time.monotonic() + 0.1, flush=True); time.sleep(0.1); os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.all_reduce(torch.ones(3))",
        BOTH,
        view,
    )
    assert [(died.rank, died.how) for died in outcome.deaths] == [(1, "was killed by SIGKILL")]
    assert [failure.rank for failure in outcome.failures] == [0]
    seen = view.times[view.events.index(outcome.deaths[0])] - float(view.text(1))
    told(capsys, f"seen after {seen:.3f} s")
    assert seen < SOON_S
    kernels.restart([1], unseen)
    assert_group_works(kernels)


def test_last_words(kernels: RankKernels) -> None:
    view = Record()
    outcome = kernels.run(
        "import ctypes, os\nif rank:\n    ctypes.string_at(0)\n"
        "os.system('echo emptied > /dev/stderr'); os.write(2, b'last words\\n'); os._exit(3)",
        BOTH,
        view,
    )
    left, crashed = sorted(outcome.deaths, key=lambda died: died.rank)
    assert (left.how, left.last_lines) == ("exited with 3", ("emptied", "last words"))
    assert crashed.how == "was killed by SIGSEGV" and "Segmentation fault" in crashed.last_lines[0]
    assert "string_at" in crashed.last_lines[1] and len(crashed.last_lines) < 10
    with pytest.raises(UsageError, match=r"rank 1 is dead too"):
        kernels.restart([0], unseen)
    shown: list[StartupProgress] = []
    kernels.restart(BOTH, shown.append)
    assert [facts.state for facts in shown[0].ranks] == [RankState.STARTING] * 2
    assert [facts.state for facts in shown[-1].ranks] == [RankState.IDLE] * 2
    assert_group_works(kernels)


def test_death_between_cells_and_of_the_reaper(kernels: RankKernels) -> None:
    ran(kernels, "import os, threading; threading.Timer(0.7, os._exit, (5,)).start()", (1,))
    until = time.monotonic() + SOON_S
    while not kernels.ranks()[1].died and time.monotonic() < until:
        time.sleep(0.05)
    view = Record()
    outcome = kernels.run("print(1)", [0], view)
    assert not outcome.deaths, "the death of a rank that is not asked is told, and is no failure"
    assert [died.how for died in view.of(Died)] == ["exited with 5"] and view.text(0) == "1\n"
    assert kernels.ranks()[1].died == "exited with 5"

    reaper = int(Path(f"/proc/{kernels.ranks()[0].pid}/stat").read_text().rpartition(")")[2].split()[1])
    threading.Timer(0.2, os.kill, (reaper, signal.SIGKILL)).start()
    outcome = kernels.run("import time; time.sleep(100)", [0], Record())
    assert len(outcome.deaths) == 1 and "reaper process" in outcome.deaths[0].how
    kernels.restart(BOTH, unseen)
    assert_group_works(kernels)


# Starts and ends ---------------------------------------------------------------------------------------------------


def test_close_leaves_no_process(kernels: RankKernels, capsys: pytest.CaptureFixture[str]) -> None:
    view = ran(
        kernels,
        "import subprocess\nchild = subprocess.Popen(['sleep', '1000'], start_new_session=True)\nprint(child.pid)",
    )
    pids = [found.pid for found in kernels.ranks()] + [int(view.text(rank)) for rank in BOTH]
    assert alive(pids) == pids
    began = time.monotonic()
    kernels.close()
    kernels.close()
    told(capsys, f"closed in {time.monotonic() - began:.1f} s")
    assert not alive(pids)


def test_a_rank_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so is damaged')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(
        RankStartFailed, match=r"rank [01] could not start: ImportError: libtorch.so is damaged"
    ) as raised:
        RankKernels(StartOptions(2, gpu_ids=()), unseen)
    assert "torch.py" in "\n".join(raised.value.last_lines)
    (tmp_path / "ipykernel.py").write_text("import os; os.write(2, b'no kernel here'); os._exit(9)\n")
    with pytest.raises(RankStartFailed, match=r"it exited with 9\n  no kernel here"):
        RankKernels(StartOptions(2, gpu_ids=()), unseen)


FULL = """
import os, resource, tempfile
from paceline.notebook.rank_kernels.driver import RankKernels
from paceline.notebook.rank_kernels.start_options import StartOptions

resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file can take a byte, as on a full disk
try:
    RankKernels(StartOptions(2, gpu_ids=()), lambda _: None)
finally:
    tempfile.tempdir = os.environ["TMPDIR"]  # it had room when the kernel started
    RankKernels(StartOptions(2, gpu_ids=()), lambda _: None)
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for that of a socket, as `tmp_path` does not always."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_a_disk_without_room(short_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(short_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, env=environment, check=False)
    assert "UsageError: cannot create the sockets of the ranks in any folder" in done.stderr
    assert f"UsageError: cannot create the sockets of the ranks in {short_path}/paceline-notebook-" in done.stderr
    assert done.stderr.count("free some space there, or set TMPDIR to a folder that can be written") == 2
    assert not list(short_path.iterdir())


def test_wishes_that_cannot_be_granted() -> None:
    with pytest.raises(UsageError, match="there is no GPU 99"):
        RankKernels(StartOptions(2, gpu_ids=(99,)), unseen)
    with pytest.raises(UsageError, match="at least 1, got 0"):
        RankKernels(StartOptions(0, gpu_ids=()), unseen)


DRIVER = """
import os, time
from paceline.notebook.rank_kernels.driver import RankKernels
from paceline.notebook.rank_kernels.start_options import StartOptions
from tests.notebook.conftest import Record, unseen

kernels = RankKernels(StartOptions(2, gpu_ids=()), unseen)
view = Record()
kernels.run('''
import os, subprocess, time
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
loader = torch.utils.data.DataLoader(range(100), num_workers=1, persistent_workers=True)
batches = iter(loader)
print(os.getpid(), child.pid, *(worker.pid for worker in batches._workers))
''', (0, 1), view)
forked = os.fork()  # as multiprocessing does; it has all that the driver had open
if not forked:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    time.sleep(60)
    os._exit(0)
print(view.text(0), view.text(1), forked, flush=True)
kernels.run("time.sleep(1000)", (0, 1), Record())
"""


def test_killing_the_users_kernel_leaves_nothing() -> None:
    root = str(Path(__file__).parents[2])
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])},
    )
    try:
        assert driver.stdout is not None
        *pids, forked = [int(word) for _ in range(3) for word in driver.stdout.readline().split()]
        assert len(pids) == 6 and alive(pids) == pids
    finally:
        driver.kill()
        driver.communicate()
    assert gone_within(pids, SOON_S)
    assert alive([forked])
    os.kill(forked, signal.SIGKILL)
