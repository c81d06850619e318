"""The matrix of faults, as data: what happens, to which job, what is asked of it, and which tests show the same in each
run of the suite."""

from dataclasses import dataclass
from typing import NamedTuple

AT = 60  # the step of most faults: two seconds into a job of 120 steps, so its steps are known
STEPS = 120
LONG = 240  # steps of an elastic job that is to see its lost ranks come back
LIMIT_S = 90.0

# What the project asks for. Seconds from the fault to the first line that names it, and to the next committed step on
# the ranks that are left, less the time of a step. A hang has to be found so long after the limit, learned or given.
DEATH_S, BACK_S, HANG_S = 1.0, 0.5, 5.0
LEARNED_S = 20.0  # the least limit that is learned from steps, and the one that the jobs give to their collectives
HURRIED_S = 8.0  # the limit of the row that gives one
# Whoever is asked to stop has to have saved and left within the grace time of a scheduler that is in a hurry.
GRACE_S = 5.0


class Start(NamedTuple):
    """One start of a job that is started several times: what is done to its files before, how far it goes."""

    steps: int = 0  # if 0, all
    ranks: int = 0
    damage: str = ""  # of `deeds.py`


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row. `faults` are what happens in a job, `deeds` what is done to it from outside, after a step.

    Both come to the first of its `starts` alone. `live`: an elastic job has these faults instead, and one start. A job
    has to end as `ends` says. `equal`: with the digest of the quiet job, which has `like` ranks. `named`: someone has
    to say which rank it was, or what, in these words (a regular expression), within `named_s`.
    `hosts`: it runs in two network namespaces. `absent`: of its two ranks the second is never started.
    `tests` are node ids of pytest that show the row.
    """

    id: str
    about: str
    faults: tuple[str, ...] = ()
    live: tuple[str, ...] = ()
    deeds: tuple[tuple[int, str], ...] = ()
    starts: tuple[Start, ...] = (Start(),)
    hosts: bool = False
    absent: bool = False
    script: tuple[str, ...] = ()  # more arguments of job.py
    launch: tuple[str, ...] = ()  # and of `paceline run`
    memory_mib: int = 0  # the limit of the job's control group
    tests: tuple[str, ...] = ()
    ranks: int = 2
    long: bool = False
    like: int = 0
    ci: bool = False
    # what is asked for
    ends: str = "finished"
    live_ends: tuple[str, ...] = ()  # elastic, if other ends are right too
    equal: bool = True
    named: str = ""
    named_s: float = DEATH_S
    back_s: float | None = None  # elastic jobs
    whole_again: bool = False  # elastic: all ranks are there within the script's own start and 2 s
    ended_s: float | None = None  # the rank at fault has been ended, or the others have given up
    out_s: float | None = None  # the job has ended
    code: int | None = None  # the exit status of the first start
    steady: bool = False  # ours: no step is made twice
    kept: bool = True  # elastic: no committed step is lost, since somebody has the whole state
    note: str = ""  # what the row cannot show, and why

    def steps_of(self, way: str) -> int:
        return LONG if self.long and way == "elastic" else STEPS

    @property
    def runs(self) -> bool:
        """Whether there is a job, and not only tests."""
        return bool(self.faults or self.deeds or self.absent or self.script or len(self.starts) > 1)


RANK_1 = r"rank 1\b.*(killed|raised|exited|stopped|froze|hangs|busy|died|no progress|slower)"
RANK_0 = RANK_1.replace("1", "0", 1)
# The launcher's, an error that ends a rank which has no launcher, and torch's.
ENDED = "|".join(
    (
        r"paceline run: rank 1 (froze|hangs|is busy).*limit",
        r"(^|\]: )paceline\.errors\.Peer(Absent|Lost)",
        r"Timed out waiting \d+ms",
    )
)
NO_LAUNCHER = "on two hosts every rank is started by itself, as Slurm does it: no launcher watches or starts again"
ELSEWHERE = (
    ". One that comes in a save or in Preemption.agreed() is named as soon, but not ended by the timeout of the "
    "replica or of the Checkpointer"
)

CASES = (
    Case(
        id="F1",
        about="exception in forward",
        faults=(f"raise rank=1 step={AT}",),
        named=RANK_1,
        back_s=BACK_S,
        ci=True,
        tests=("tests/procs/test_failure_notices.py",),
    ),
    Case(
        id="F2",
        about="SIGKILL of a rank",
        faults=(f"kill rank=1 step={AT} where=backward",),
        named=RANK_1,
        back_s=BACK_S,
        whole_again=True,
        long=True,
        ci=True,
        tests=("tests/procs/test_train.py::test_a_killed_rank_is_named_and_the_run_ends_by_itself",),
    ),
    Case(
        id="F3",
        about="SIGKILL of rank 0",
        faults=(f"kill rank=0 step={AT}",),
        named=RANK_0,
        back_s=BACK_S,
        whole_again=True,
        long=True,
        ci=True,
        tests=("tests/procs/test_elastic_launch.py::test_rank_0_is_killed_and_the_others_live_on",),
    ),
    Case(
        id="F4",
        about="SIGKILL before an update",
        faults=(f"kill rank=1 step={AT} where=update",),
        named=RANK_1,
        back_s=BACK_S,
        tests=("tests/procs/test_elastic.py::test_a_rank_is_killed",),
    ),
    Case(
        id="F5",
        about="two at once, and a third",
        ranks=3,
        long=True,
        named=r"ranks? .*1\b.*(was|were) killed",
        back_s=2 * BACK_S,
        kept=False,
        faults=(f"kill rank=1 step={AT}", f"kill rank=2 step={AT}", f"kill rank=0 step={AT + 20}"),
        tests=("tests/procs/test_elastic_launch.py::test_two_are_lost_one_after_the_other",),
        note="the third is killed before the first two have started anew, so an elastic job has nobody left and goes "
        "on from its newest checkpoint",
    ),
    Case(id="F6", about="all ranks killed", faults=(f"kill rank=all step={AT}",), named=r"rank.*killed", kept=False),
    Case(
        id="F7",
        about="SIGSTOP",
        faults=(f"stop rank=1 step={AT}",),
        named=RANK_1,
        named_s=HANG_S,
        ci=True,
        tests=("tests/procs/test_hang.py",),
    ),
    Case(id="F8", about="a freeze of 2 s", faults=(f"stop rank=1 step={AT} seconds=2",), steady=True),
    Case(
        id="F9", about="native code keeps the GIL", faults=(f"freeze rank=1 step={AT}",), named=RANK_1, named_s=HANG_S
    ),
    Case(
        id="F10",
        about="a rank spins",
        faults=(f"spin rank=1 step={AT}",),
        named=RANK_1,
        named_s=HANG_S,
        ended_s=LEARNED_S + HANG_S,
    ),
    Case(
        id="F11",
        about="a slow rank",
        faults=("slow rank=1 step=10 seconds=0.15",),
        named=RANK_1,
        named_s=HANG_S,
        steady=True,
    ),
    Case(
        id="F12",
        about="silent partition",
        hosts=True,
        deeds=((AT + 4, "partition"),),  # not in a save: see the note
        ends="failed",
        equal=False,
        named=r"rank \d",
        named_s=HANG_S,
        ended_s=LEARNED_S + HANG_S,
        note=NO_LAUNCHER + ELSEWHERE,
    ),
    Case(
        id="F13",
        about="one-way drop",
        hosts=True,
        deeds=((AT + 4, "one-way"),),  # not in a save: see the note
        ends="failed",
        equal=False,
        named=r"rank \d",
        named_s=HANG_S,
        ended_s=LEARNED_S + HANG_S,
        note=NO_LAUNCHER + ELSEWHERE,
    ),
    Case(id="F14", about="flapping link, 1 s in 5", hosts=True, deeds=((AT, "flap"),), steady=True, note=NO_LAUNCHER),
    Case(
        id="F15",
        about="sockets between ranks reset",
        deeds=((AT, "reset"),),
        script=("--transport", "torch"),
        tests=(
            "tests/procs/test_rejoin.py::test_ranks_that_were_stopped_apart_go_on_together",
            "tests/procs/test_waits.py::test_survivors_name_the_killed_rank",
        ),
        note="lanes of one machine use shared memory by themselves, where there is no socket between ranks to reset",
    ),
    Case(
        id="F16",
        about="a bit flips on the wire",
        script=("--transport", "torch", "--checksums", "--flip-on-wire", str(AT)),
        ranks=3,
        named=r"MessageDamaged|damaged",
        tests=("tests/procs/test_checksums.py",),
        note="the bit flips in the process: in what has arrived (ours), or in what is handed to gloo (torch). Nothing "
        "here can change a packet and mend its checksum",
    ),
    Case(id="F17", about="a link of 20 Mbit/s", hosts=True, deeds=((AT, "slow"),), steady=True, note=NO_LAUNCHER),
    Case(
        id="F18",
        about="SIGTERM",
        deeds=((AT, "TERM"),),
        starts=(Start(), Start()),
        out_s=GRACE_S,
        code=143,
        steady=True,
        ci=True,
        tests=("tests/procs/test_train.py::test_stopped_and_resumed_is_the_run_that_was_not_stopped",),
    ),
    Case(
        id="F19",
        about="SIGTERM twice",
        deeds=((AT, "TERM"), (AT, "TERM")),
        starts=(Start(), Start()),
        out_s=GRACE_S,
        code=143,
        steady=True,
    ),
    Case(
        id="F20",
        about="disk full",
        faults=(f"disk-full rank=0 step={AT - 5} seconds=1",),
        ci=True,
        named="No space left",
        named_s=HANG_S,  # the save after the one that failed says so
        tests=("tests/procs/test_checkpoint_kills.py::test_a_disk_that_is_full_and_one_that_is_read_only",),
    ),
    Case(
        id="F21",
        about="fsync fails",
        deeds=((AT, "fsync"),),
        named="Input/output error",
        named_s=HANG_S,
        tests=("tests/procs/test_checkpoint_kills.py::test_an_error_of_any_call_is_told_and_leaves_nothing",),
        note="torch.save calls no fsync, so nothing fails there",
    ),
    Case(
        id="F22",
        about="SIGKILL in a save, at each call",
        deeds=((AT, "kill-save"),),
        named=RANK_0,
        named_s=HANG_S,  # the next save may be 10 steps away
        ci=True,
        tests=("tests/procs/test_checkpoint_kills.py::test_killed_at_every_system_call_of_a_save",),
        note="the job is killed as it renames a save into place; every other call is in the test",
    ),
    Case(
        id="F23",
        about="truncated or missing files",
        starts=(Start(AT), Start(damage="truncate")),
        named="is passed over",
        named_s=60.0,
        kept=False,
        tests=("tests/unit/test_checkpoint_snapshots.py::test_what_is_not_the_file_that_was_written_is_refused",),
    ),
    Case(
        id="F24",
        about="a bit flips in a checkpoint",
        starts=(Start(AT), Start(damage="flip")),
        named="is passed over",
        named_s=60.0,
        kept=False,
        ci=True,
        tests=("tests/unit/test_checkpoint_snapshots.py::test_1000_of_1000_flipped_bits_are_seen",),
    ),
    Case(
        id="F25",
        about="ranks see different checkpoints",
        script=("--own-folders",),
        starts=(Start(AT), Start(damage="lose-one")),
        kept=False,
        tests=("tests/procs/test_checkpoint_ranks.py::test_ranks_that_do_not_share_a_directory_have_copies_and_agree",),
    ),
    Case(
        id="F26",
        about="a bit flips in a parameter",
        faults=(f"flip rank=1 step={AT}",),
        ci=True,
        named=r"rank.*differ",
        kept=False,
        tests=(
            "tests/ranks/test_agreement.py::test_two_hundred_flipped_bits_are_all_found_and_named",
            "tests/procs/test_elastic.py::test_a_rank_whose_state_has_drifted_is_replaced",
            "tests/procs/test_elastic.py::test_two_ranks_that_have_drifted_go_back_to_what_was_saved_before",
        ),
        note="of two ranks nobody can tell which one is right, so both go back to a checkpoint that had been compared",
    ),
    Case(
        id="F27",
        about="a gradient is wrong on one rank",
        ranks=3,
        # Of 6 lanes rank 1 has the third and the fourth; the audit of step 62 is of the third.
        faults=("scale rank=1 step=62 factor=1.0001",),
        script=("--audit-every", "1"),
        named=r"rank 1 computes wrong",
        tests=("tests/procs/test_audit.py::test_the_rank_is_named_and_others_are_not",),
        note="one wrong gradient, in a lane that is audited in that step: an audit sees one lane of a step",
    ),
    Case(
        id="F28",
        about="a gradient is NaN",
        faults=(f"nan rank=1 step={AT}",),
        equal=False,
        ci=True,
        named=r"not finite|NaN",
        tests=("tests/ranks/test_agreement.py::test_a_step_that_is_not_finite_is_skipped_on_all_ranks",),
    ),
    Case(
        id="F29",
        about="ranks do different things",
        script=("--swap", str(AT)),
        launch=("--max-restarts", "0"),
        ends="failed",
        live_ends=("failed", "finished"),
        equal=False,
        named=r"called all_reduce",
        named_s=2.0,
        ci=True,
        tests=(
            "tests/procs/test_checked.py",
            "tests/procs/test_faults.py",
            "tests/procs/test_waits.py",
            "tests/procs/test_shm.py::test_ranks_that_differ_all_learn_it_and_go_on",
        ),
        note="the job swaps two sums of equal shape; the other eight ways to differ are in the tests. It does so in "
        "every attempt, so it has to fail; an elastic job goes on with the rank that nobody disagrees with any more",
    ),
    Case(
        id="F30",
        about="uneven data",
        ranks=3,
        like=1,
        script=("--samples", "614"),
        tests=(
            "tests/procs/test_replica.py::test_uneven_inputs_as_torch_does",
            "tests/procs/test_data_ranks.py::test_a_tail_too_short_for_all_ranks_hangs_nobody",
        ),
        note="51 steps and 2 samples make an epoch. Ours has to equal one rank. Each of torch's ranks has a third of "
        "the data and goes on to its next epoch when that ends, so what meets in a step depends on the number of ranks",
    ),
    Case(
        id="F31",
        about="a DataLoader worker is killed, another stopped",
        script=("--workers", "1"),
        named=r"DataLoader worker",
        faults=(f"kill-worker rank=1 step={AT}", f"stop-worker rank=0 step={AT + 20}"),
        kept=False,
        tests=("tests/procs/test_data_workers.py",),
        note="an elastic job loses a rank with its worker, and the second before the first is there again",
    ),
    Case(
        id="F32",
        about="out of memory",
        faults=(f"oom rank=1 step={AT}",),
        memory_mib=1536,
        named=r"rank 1\b.*OOM killer",
        named_s=HANG_S,  # its memory has to be filled first
        tests=("tests/procs/test_launch.py::test_the_kernel_killing_for_memory_is_told",),
    ),
    Case(
        id="F33",
        about="ports taken, strangers",
        deeds=((AT, "strangers"),),
        steady=True,
        tests=(
            "tests/procs/test_start.py",
            "tests/procs/test_launch.py::test_a_port_in_use_is_one_line",
            "tests/procs/test_strangers.py",
        ),
        note="the job has strangers at all of its ports; ports that are taken are in the tests",
    ),
    Case(
        id="F34",
        about="a rank never comes",
        absent=True,
        ends="failed",
        equal=False,
        named=r"rank 1\b",
        named_s=32.0,  # the default of 30 s
        tests=("tests/procs/test_start.py::test_missing_ranks_are_named_on_every_rank",),
        note="rank 0 is started by itself, with a launcher's variables",
    ),
    Case(id="F35", about="a clock that is an hour off", script=("--clock", "3600"), steady=True),
    Case(
        id="F36",
        about="fewer ranks, and more again: 4, 3, 2, 4",
        ranks=4,
        starts=(Start(40), Start(70, 3), Start(90, 2), Start()),
        live=(f"kill rank=3 step={AT - 20}", f"kill rank=2 step={AT}"),
        steady=True,
        ci=True,
        tests=(
            "tests/procs/test_elastic_launch.py",
            "tests/procs/test_train_lanes.py::test_every_world_and_every_resume_gives_the_same_bits",
        ),
        note="an elastic job loses two ranks and has them back; the others are started with so many ranks",
    ),
    Case(
        id="F37",
        about="no more open files",
        faults=(f"no-files rank=1 step={AT}",),
        equal=False,
        tests=("tests/procs/test_launch.py::test_too_few_open_files_are_one_line",),
    ),
    Case(
        id="F38",
        about="one thing after the other",
        ranks=3,
        long=True,
        named=r"rank \d",
        faults=tuple(
            f"{kind} rank={rank} step={step}"
            for kind, rank, step in (
                ("kill", 1, 20),
                ("stop", 2, 45),
                ("kill", 0, 70),
                ("raise", 1, 90),
                ("kill", 2, 100),
            )
        ),
        kept=False,
        tests=("tests/procs/test_chaos.py",),
        note="where lost ranks take longer than 50 steps to come back, nobody is left in an elastic job when rank 0 is "
        "killed, and it goes on from its newest checkpoint; ten minutes of faults are soak.py",
    ),
    Case(
        id="hang",
        about=f"a rank waits for ever, limit {HURRIED_S:g} s",
        faults=(f"sleep rank=1 step={AT}",),
        launch=("--hang-timeout", f"{HURRIED_S:g}"),
        script=("--timeout", f"{HURRIED_S:g}"),
        named=RANK_1,
        named_s=HANG_S,
        ended_s=HURRIED_S + HANG_S,
        tests=("tests/procs/test_hang.py",),
        note="no row of the research: it measures that a hang is found within the limit and 5 s. The limit is "
        "--hang-timeout of ours, and the timeout of torch's process group",
    ),
)
