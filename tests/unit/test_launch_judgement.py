"""Why a job failed, and which rank hangs, from what the launcher has seen."""

import signal
import traceback
from dataclasses import replace

import pytest

from paceline.launch.failure import End, follows, root_cause
from paceline.launch.reports import Mark
from paceline.launch.tracebacks import HEADER
from paceline.launch.watchdog import (
    BUSY,
    CEILING_S,
    FLOOR_S,
    FROZE,
    GAP_S,
    HOLDS_GIL,
    IDLE_S,
    LATE_S,
    MOVED,
    STOPPED_S,
    Hang,
    Watchdog,
)
from paceline.process_status import ProcessStatus
from paceline.progress import Phase


def raised(rank: int, message: str, *, at: float = 0.0, frames: int = 2, line: int = 1, more: str = "") -> End:
    body = [text for n in range(frames) for text in (f'  File "train.py", line {line + n}, in f', "    f()")]
    return End(
        rank, at, code=1, raised=True, tail=("noise", HEADER, *body, *message.split("\n"), *([more] if more else []))
    )


def test_a_rank_that_was_lost_with_its_machine_is_named_so() -> None:
    lost = "its machine 10.0.0.7: no answer for 3.1 s"
    failure = root_cause([End(1, 2.0, killed_by=signal.SIGKILL, lost=lost), raised(0, "PeerLost: rank 1", at=1.0)])
    assert failure is not None
    assert (failure.summary, failure.exit_code) == (f"rank 1 was lost with {lost}", 137)


def test_no_failure() -> None:
    assert root_cause([End(0, 0.0), End(1, 1.0, killed_by=signal.SIGTERM, asked=True)]) is None


def test_the_same_error_on_all_ranks_is_one() -> None:
    failure = root_cause([raised(rank, "ValueError: no", at=rank) for rank in (2, 0, 1)])
    assert failure is not None
    assert (failure.ranks, failure.exit_code) == ((0, 1, 2), 1)
    assert failure.lines()[0] == "ranks 0-2 raised ValueError: no"
    assert failure.others == ()


def test_texts_that_differ_are_said_to_differ() -> None:
    failure = root_cause([raised(rank, f"ValueError: sample {rank}") for rank in range(2)])
    assert failure is not None
    assert failure.ranks == (0, 1)
    assert "rank 0's" in failure.lines()[-1]


@pytest.mark.parametrize(
    "text",
    [
        "paceline.errors.PeerLost: rank 1 died",
        "paceline.errors.PeerAbsent: rank 0 waited",
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes",
        "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1",
        "RuntimeError: NCCL communicator was aborted on rank 0.",
    ],
)
def test_those_who_fell_with_another_are_not_the_cause(text: str) -> None:
    failure = root_cause([raised(0, text, at=1.0), raised(1, "KeyError: 'x'", at=2.0), raised(2, text, at=1.5)])
    assert failure is not None
    assert failure.ranks == (1,)
    assert failure.others[0].startswith("afterwards ranks 0,2 raised ")
    assert root_cause([raised(0, text, at=1.0)]) is not None
    assert follows(raised(0, text))


def group_end(rank: int, *exceptions: Exception) -> End:
    """What Python writes for a group, read from Python itself."""
    try:
        try:
            raise KeyError("before")
        except KeyError:
            raise ExceptionGroup("many", exceptions) from None
    except ExceptionGroup as group:
        return End(rank, 0.0, code=1, raised=True, tail=tuple("".join(traceback.format_exception(group)).splitlines()))


def caught(error: Exception) -> Exception:
    try:
        raise error
    except type(error) as found:
        return found


def test_of_a_group_every_exception_is_shown_where_it_was_raised() -> None:
    inner = ExceptionGroup("inner", [caught(KeyError("k"))])
    failure = root_cause([group_end(rank, caught(ValueError("first")), inner) for rank in (0, 1)])
    assert failure is not None
    assert failure.ranks == (0, 1)
    first, *lines = failure.lines()
    assert first == "ranks 0-1 raised ExceptionGroup: many (2 sub-exceptions)"
    for words in ("  ValueError: first", "  ExceptionGroup: inner (1 sub-exception)", "  KeyError: 'k'"):
        assert words in lines
    assert "in caught" in lines[lines.index("  ValueError: first") - 1]
    assert not [line for line in lines if "|" in line or "+--" in line]
    crowd = root_cause([group_end(0, *(caught(ValueError(str(number))) for number in range(50)))])
    assert crowd is not None and len(crowd.lines()) <= 14


def test_a_group_follows_only_when_all_of_it_does() -> None:
    lost, own = RuntimeError("PeerLost: rank 1 died"), ValueError("my own")
    for exceptions, expected in (((lost, ExceptionGroup("in", [lost])), True), ((lost, own), False)):
        assert follows(group_end(0, *exceptions)) is expected


def test_several_ranks_take_the_plural() -> None:
    failure = root_cause([End(0, 0.0, code=7), *(End(rank, 1.0, killed_by=signal.SIGKILL) for rank in (1, 2))])
    assert failure is not None
    assert failure.others == ("afterwards ranks 1-2 were killed by SIGKILL",)
    for memory in (False, True):
        found = root_cause([End(rank, 0.0, killed_by=signal.SIGKILL, out_of_memory=memory) for rank in (0, 1)])
        assert found is not None
        assert found.summary.startswith("ranks 0-1 were ")


def test_a_traceback_that_was_caught_is_not_the_cause() -> None:
    caught = raised(0, "ValueError: caught")
    exited = root_cause([replace(caught, raised=False, code=9)])
    killed = root_cause([replace(caught, killed_by=signal.SIGKILL, code=0)])
    assert exited is not None and killed is not None
    assert (exited.summary, killed.summary) == ("rank 0 exited with code 9", "rank 0 was killed by SIGKILL")


def test_the_first_of_two_causes_is_shown() -> None:
    failure = root_cause([raised(0, "KeyError: 'late'", at=2.0), End(1, 1.0, killed_by=signal.SIGSEGV)])
    assert failure is not None
    assert (failure.summary, failure.exit_code, failure.ranks) == ("rank 1 was killed by SIGSEGV", 139, (1,))


def test_kinds() -> None:
    memory = root_cause([End(3, 0.0, killed_by=signal.SIGKILL, out_of_memory=True)])
    killed = root_cause([End(3, 0.0, killed_by=signal.SIGKILL)])
    never = root_cause([End(0, 0.0, code=127, never="no such file")])
    assert memory is not None and killed is not None and never is not None
    assert memory.summary.startswith("rank 3 was killed by the OOM killer")
    assert killed.summary == "rank 3 was killed by SIGKILL"
    assert never.summary == "rank 0 never started: no such file"
    assert [one.exit_code for one in (memory, killed, never)] == [137, 137, 127]


@pytest.mark.parametrize("frames", [1, 5, 200])
def test_a_report_is_short(frames: int) -> None:
    ends = [raised(0, "ValueError: " + "long " * 500 + "\nsecond line\nthird", frames=frames)]
    ends += [raised(rank, f"Odd{rank}: PeerLost", at=1.0, line=rank) for rank in range(1, 9)]
    failure = root_cause(ends)
    assert failure is not None
    assert len(failure.lines()) <= 14
    assert all(len(line) < 400 for line in failure.lines())
    assert 'File "train.py"' in failure.lines()[4], "after the four lines of the message"


def test_a_long_message_keeps_its_advice() -> None:
    told = "the model is too large, " * 12 + "so use a smaller one or more ranks"
    failure = root_cause([raised(0, f"UsageError: {told}")])
    assert failure is not None
    first, second, *frames = failure.lines()
    assert f"{first} {second.strip()}" == f"rank 0 raised UsageError: {told}"
    assert 'File "train.py"' in frames[0]
    longer = root_cause([raised(0, f"UsageError: {told * 9}")])
    assert longer is not None
    assert longer.lines()[2] == "  …" and longer.lines()[3].endswith("a smaller one or more ranks")


def test_what_a_destructor_raised_is_not_the_cause() -> None:
    """Python writes it at the very end, when modules are gone already."""
    where = ("Exception ignored in: <generator object LaneLoop.run at 0x7f>", HEADER, '  File "lanes.py", line 1')
    ignored = (*where, "AttributeError: 'NoneType' object has no attribute 'random'")
    own = raised(0, "ValueError: my own bug")
    failure = root_cause([replace(own, tail=(*own.tail, *ignored))])
    assert failure is not None
    assert failure.lines()[0] == "rank 0 raised ValueError: my own bug"
    assert not [line for line in failure.lines() if "ignored" in line]
    exited = root_cause([replace(own, code=3, tail=("bye", *ignored))])
    assert exited is not None and (exited.summary, exited.exit_code) == ("rank 0 exited with code 3", 3)


def test_lines_after_a_traceback_are_not_its_message() -> None:
    failure = root_cause([raised(0, "ValueError: no", more="[W1116 torch] destroy_process_group() was not called")])
    assert failure is not None
    assert not [line for line in failure.lines() if "destroy" in line]


# ------------------------------------------------------------------------------------------------------------- watchdog


class World:
    """Ranks whose marks and statuses a test sets, on a clock of its own."""

    def __init__(self, ranks: int = 2, timeout_s: float | None = None) -> None:
        self.watchdog = Watchdog(range(ranks), timeout_s)
        self.now = 100.0
        self.marks = dict.fromkeys(range(ranks), Mark(Phase.STARTING, -1, 0.0))
        self.statuses = dict.fromkeys(range(ranks), ProcessStatus("S", 0.0))

    def note(self, rank: int, phase: Phase, step: int) -> None:
        self.marks[rank] = Mark(phase, step, self.now)

    def look(self) -> Hang | None:
        return self.watchdog.look(self.now, dict(self.marks), self.statuses)

    def wait(self, seconds: float, *, busy: tuple[int, ...] = ()) -> Hang | None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            for rank in busy:
                self.statuses[rank] = ProcessStatus("R", self.statuses[rank].cpu_s + 0.5)
            found = self.look()
            if found is not None:
                return found
        return None

    def run(self, steps: int, step_s: float = 1.0) -> None:
        for step in range(steps):
            for rank in self.marks:
                self.note(rank, Phase.FORWARD, step)
            assert self.wait(step_s) is None


def test_patience_is_learned() -> None:
    world = World()
    assert world.watchdog.patience_s() == CEILING_S
    world.run(20, 1.0)
    assert world.watchdog.patience_s() == FLOOR_S
    assert world.watchdog.patience_s(Phase.CHECKPOINT) == CEILING_S
    slow = World()
    slow.run(20, 10.0)
    assert slow.watchdog.patience_s() == pytest.approx(100.0, rel=0.1)


def test_too_little_time_to_save_and_leave_is_said() -> None:
    world = World(2)
    assert world.watchdog.shortfall(30.0) == ""  # it is not known
    world.run(12, step_s=45.0)
    assert world.watchdog.shortfall(60.0) == ""
    assert world.watchdog.shortfall(30.0).startswith(
        "a step takes 45 s, and ranks have 30 s to end theirs, save and leave"
    )


def test_who_never_notes_is_never_suspected() -> None:
    assert World(timeout_s=1.0).wait(10_000) is None


def test_a_frozen_rank() -> None:
    world = World()
    world.run(10)
    world.note(0, Phase.WAITING, 9)
    found = world.wait(CEILING_S)
    assert found is not None
    assert (found.ranks, found.how, found.step) == ((1,), FROZE, 9)


def test_a_spinning_rank() -> None:
    world = World(3)
    world.run(10)
    world.note(0, Phase.BACKWARD, 10)
    world.note(2, Phase.BACKWARD, 10)
    found = world.wait(CEILING_S, busy=(1,))
    assert found is not None
    assert (found.ranks, found.how) == ((1,), BUSY)


def test_a_stopped_rank_is_seen_soon_and_a_pause_is_forgiven() -> None:
    world = World()
    world.run(10)
    world.statuses[1] = ProcessStatus("T", 0.0)
    assert world.wait(STOPPED_S - 1) is None
    world.statuses[1] = ProcessStatus("S", 0.0)
    assert world.wait(1) is None
    world.statuses[1] = ProcessStatus("T", 0.0)
    found = world.wait(STOPPED_S + 1)
    assert found is not None
    assert (found.ranks, found.how) == ((1,), FROZE)


def test_a_debugger_is_no_hang() -> None:
    world = World()
    world.run(10)
    world.statuses[1] = ProcessStatus("t", 0.0)
    assert world.wait(STOPPED_S * 2) is None


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.DONE])
def test_idle_and_finished_ranks_may_rest(phase: Phase) -> None:
    world = World()
    world.run(10)
    for rank in range(2):
        world.note(rank, phase, 10)
    assert world.wait(CEILING_S * 2) is None


def test_when_nobody_ran_nobody_hung() -> None:
    world = World(timeout_s=5.0)
    world.run(10)
    world.now += 3600  # the machine slept
    assert world.look() is None
    assert world.wait(4) is None
    assert world.wait(5) is not None
    assert GAP_S < 5


def test_an_explicit_time_is_kept() -> None:
    world = World(timeout_s=3.0)
    world.run(5)
    found = world.wait(10)
    assert found is not None
    assert found.ranks == (0, 1)


@pytest.mark.parametrize(
    ("timeout_s", "busy", "limit_s"), [(3.0, (), 6.0), (None, (0,), CEILING_S), (None, (), IDLE_S)]
)
def test_code_between_steps_has_more_time_than_a_step(
    timeout_s: float | None, busy: tuple[int, ...], limit_s: float
) -> None:
    world = World(timeout_s=timeout_s)
    world.run(10)
    world.note(0, Phase.BETWEEN, 10)
    world.note(1, Phase.WAITING, 10)
    assert world.wait(limit_s - 1, busy=busy) is None
    found = world.wait(2, busy=busy)
    assert found is not None and found.ranks == (0,)
    assert f"between steps (limit {limit_s:.0f} s)" in found.reason


@pytest.mark.parametrize("phase", [Phase.BETWEEN, Phase.EVALUATE, Phase.CHECKPOINT, Phase.LOAD])
def test_files_that_are_read_or_written_are_progress_where_a_step_is_not_run(phase: Phase) -> None:
    world = World()
    world.run(10)
    world.note(0, phase, 10)
    world.note(1, Phase.WAITING, 10)
    for written in range(1, 11):
        world.statuses[0] = ProcessStatus("D", 0.0, written * MOVED)
        assert world.wait(IDLE_S - 10) is None
    assert world.wait(CEILING_S) is not None


def test_in_a_forward_files_are_no_progress() -> None:
    world = World()
    world.run(10)
    for written in range(int(FLOOR_S)):
        world.statuses[0] = ProcessStatus("D", 0.0, written * MOVED)
        assert world.wait(0.5) is None
    assert world.wait(FLOOR_S) is not None


def test_native_code_that_keeps_the_interpreters_lock_is_told_from_a_freeze() -> None:
    world = World()
    world.run(10)
    world.note(0, Phase.WAITING, 9)
    beats = {0: 0.0, 1: world.now}
    for stays_silent in (True, False):
        found = None
        while found is None:
            world.now += 0.5
            beats[0] = world.now
            if not stays_silent:
                beats[1] = world.now
            found = world.watchdog.look(world.now, world.marks, world.statuses, beats)
        assert (found.ranks, found.how) == ((1,), HOLDS_GIL if stays_silent else FROZE)
        world.note(1, Phase.FORWARD, 10)


def test_a_rank_whose_worker_is_stopped_is_ended_soon() -> None:
    world = World()
    world.run(10)
    world.note(1, Phase.BETWEEN, 10)
    asked = []

    def stopped_children(rank: int) -> list[int]:
        asked.append(rank)
        return [1234] if rank == 1 else []

    began = world.now
    found = None
    while found is None:
        world.now += 0.5
        world.note(0, Phase.BETWEEN, 10)
        found = world.watchdog.look(world.now, world.marks, world.statuses, {}, stopped_children)
    assert found.ranks == (1,) and "DataLoader workers: pid 1234" in found.reason
    assert world.now - began < 2 * STOPPED_S + 1
    assert set(asked) == {1}, "only a rank that makes no progress is asked about"


def late(world: World) -> list[tuple[int, str]]:
    return world.watchdog.late(world.now, world.marks, world.statuses)


def test_a_rank_that_others_wait_for_is_named_long_before_it_is_ended() -> None:
    world = World()
    world.run(10, 0.5)
    assert world.wait(2 * LATE_S) is None
    assert late(world) == [], "nobody waits for it"
    world.note(0, Phase.WAITING, 9)
    [(rank, how)] = late(world)
    assert rank == 1 and "in forward, at step 9, using 0% of a core" in how
    assert late(world) == [], "once"
    world.note(1, Phase.BETWEEN, 10)
    assert world.wait(2 * LATE_S) is None
    assert late(world) == [], "what a script does between steps may take a while"
    assert world.wait(4 * LATE_S) is None
    assert "between steps" in late(world)[0][1]


def test_a_late_rank_is_measured_by_the_steps_of_its_job() -> None:
    world = World()
    world.run(10, 4.0)
    world.note(1, Phase.FORWARD, 10)
    world.note(0, Phase.WAITING, 10)
    assert world.wait(4 * LATE_S) is None
    assert late(world) == []
    assert world.wait(4 * LATE_S) is None
    assert late(world) != []


@pytest.mark.parametrize("phase", [Phase.BETWEEN, Phase.EVALUATE, Phase.CHECKPOINT])
def test_what_nobody_waits_for_may_take_long_if_nobody_has_set_a_time(phase: Phase) -> None:
    world = World()
    world.run(10)
    for rank in range(2):
        world.note(rank, phase, 10)
    assert world.wait(2 * CEILING_S) is None
    world.note(1, Phase.WAITING, 10)
    found = world.wait(2)
    assert found is not None and found.ranks == (0,)


@pytest.mark.parametrize("phase", [Phase.EVALUATE, Phase.CHECKPOINT])
def test_an_evaluation_or_a_save_is_not_hurried(phase: Phase) -> None:
    """Nor are those who wait for the rank that does it."""
    world = World(timeout_s=3.0)
    world.run(10)
    world.note(0, phase, 10)
    world.note(1, Phase.WAITING, 10)
    assert world.wait(CEILING_S - 10) is None
    world.note(0, phase, 10)  # the next part of it
    assert world.wait(CEILING_S - 20) is None
    assert World(timeout_s=2 * CEILING_S).watchdog.patience_s(phase) == 2 * CEILING_S


def test_when_all_ranks_wait_they_wait_for_each_other() -> None:
    world = World(timeout_s=3.0)
    world.run(10)
    for rank in range(2):
        world.note(rank, Phase.WAITING, 10)
    found = world.wait(10)
    assert found is not None and found.ranks == (0, 1) and "waiting for other ranks (limit 3 s)" in found.reason


def test_a_stopped_rank_of_any_script_is_found() -> None:
    world = World()
    world.statuses[1] = ProcessStatus("T", 0.0)
    found = world.wait(2 * STOPPED_S)
    assert found is not None and found.ranks == (1,)


def test_a_job_that_is_paused_as_a_whole_is_left_alone_unless_a_time_was_given() -> None:
    for timeout_s, ranks in ((1.0, (0, 1)), (None, None)):
        world = World(timeout_s=timeout_s)
        for rank in range(2):
            world.statuses[rank] = ProcessStatus("T", 0.0)
        found = world.wait(2 * STOPPED_S)
        assert (found and found.ranks) == ranks
