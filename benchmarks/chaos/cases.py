"""The matrix of faults, as data: what happens, to which job, and which tests show the same in each run of the suite."""

from dataclasses import dataclass

AT = 60  # the step of most faults: two seconds into a job of 120 steps, so its steps are known
LIMIT_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row. `faults` and `signals` are what happens to a job; `tests` are node ids of pytest that show the row.

    `again`: the job is started a second time, and ends there. `equal`: its digest is that of the quiet job.
    `named`: someone has to say which rank it was, in these words (a regular expression).
    `hosts`: the job runs in two network namespaces, and this is done to the link between them.
    """

    id: str
    about: str
    faults: tuple[str, ...] = ()
    signals: tuple[tuple[int, str], ...] = ()  # after this step, to the launcher
    hosts: str = ""
    tests: tuple[str, ...] = ()
    ranks: int = 2
    workers: int = 0
    clock: float = 0.0
    again: bool = False
    equal: bool = True
    named: str = ""
    ci: bool = False


RANK_1 = r"rank 1\b.*(killed|raised|exited|stopped|froze|hangs|busy|died|no progress|slower)"
RANK_0 = RANK_1.replace("1", "0", 1)

CASES = (
    Case(
        id="F1",
        about="exception in forward",
        faults=(f"raise rank=1 step={AT}",),
        named=RANK_1,
        ci=True,
        tests=("tests/procs/test_failure_notices.py",),
    ),
    Case(
        id="F2",
        about="SIGKILL of a rank",
        faults=(f"kill rank=1 step={AT} where=backward",),
        named=RANK_1,
        ci=True,
        tests=("tests/procs/test_train.py::test_a_killed_rank_is_named_and_the_run_ends_by_itself",),
    ),
    Case(
        id="F3",
        about="SIGKILL of rank 0",
        faults=(f"kill rank=0 step={AT}",),
        named=RANK_0,
        ci=True,
        tests=("tests/procs/test_elastic_launch.py::test_rank_0_is_killed_and_the_others_live_on",),
    ),
    Case(
        id="F4",
        about="SIGKILL before an update",
        faults=(f"kill rank=1 step={AT} where=update",),
        named=RANK_1,
        tests=("tests/procs/test_elastic.py::test_a_rank_is_killed",),
    ),
    Case(
        id="F5",
        about="two at once, and a third",
        ranks=3,
        named=RANK_1,
        faults=(f"kill rank=1 step={AT}", f"kill rank=2 step={AT}", f"kill rank=0 step={AT + 20}"),
        tests=("tests/procs/test_elastic_launch.py::test_two_are_lost_one_after_the_other",),
    ),
    Case(id="F6", about="all ranks killed", faults=(f"kill rank=all step={AT}",), named=r"rank.*killed"),
    Case(
        id="F7",
        about="SIGSTOP",
        faults=(f"stop rank=1 step={AT}",),
        named=RANK_1,
        ci=True,
        tests=("tests/procs/test_hang.py",),
    ),
    Case(id="F8", about="a freeze of 2 s", faults=(f"stop rank=1 step={AT} seconds=2",)),
    Case(id="F9", about="native code keeps the GIL", faults=(f"freeze rank=1 step={AT}",), named=RANK_1),
    Case(id="F10", about="a rank spins", faults=(f"spin rank=1 step={AT}",), named=RANK_1),
    Case(id="F11", about="a slow rank", faults=("slow rank=1 step=10 seconds=0.15",), named=RANK_1),
    Case(id="F12", about="silent partition", hosts="partition", equal=False, named=r"rank \d"),
    Case(id="F13", about="one-way drop", hosts="one-way", equal=False, named=r"rank \d"),
    Case(id="F14", about="flapping link, 1 s in 5", hosts="flap"),
    Case(
        id="F15",
        about="sockets between ranks closed",
        tests=("tests/notebook/test_failures.py", "tests/procs/test_waits.py"),
    ),
    Case(id="F16", about="a bit flips on the wire", tests=("tests/procs/test_checksums.py",)),
    Case(id="F17", about="a link of 20 Mbit/s", hosts="slow"),
    Case(
        id="F18",
        about="SIGTERM",
        signals=((AT, "TERM"),),
        again=True,
        ci=True,
        tests=("tests/procs/test_train.py::test_stopped_and_resumed_is_the_run_that_was_not_stopped",),
    ),
    Case(id="F19", about="SIGTERM twice", signals=((AT, "TERM"), (AT, "TERM")), again=True),
    Case(
        id="F20",
        about="disk full",
        faults=(f"disk-full rank=0 step={AT - 5} seconds=1",),
        ci=True,
        named="No space left",
        tests=("tests/procs/test_checkpoint_kills.py::test_a_disk_that_is_full_and_one_that_is_read_only",),
    ),
    Case(
        id="F21",
        about="fsync fails",
        tests=("tests/procs/test_checkpoint_kills.py::test_an_error_of_any_call_is_told_and_leaves_nothing",),
    ),
    Case(
        id="F22",
        about="SIGKILL at every call of a save",
        ci=True,
        tests=("tests/procs/test_checkpoint_kills.py::test_killed_at_every_system_call_of_a_save",),
    ),
    Case(
        id="F23",
        about="truncated or missing files",
        tests=("tests/unit/test_checkpoint_snapshots.py::test_what_is_not_the_file_that_was_written_is_refused",),
    ),
    Case(
        id="F24",
        about="a bit flips in a checkpoint",
        ci=True,
        tests=("tests/unit/test_checkpoint_snapshots.py::test_1000_of_1000_flipped_bits_are_seen",),
    ),
    Case(
        id="F25",
        about="ranks see different checkpoints",
        tests=("tests/procs/test_checkpoint_ranks.py::test_ranks_that_do_not_share_a_directory_have_copies_and_agree",),
    ),
    Case(
        id="F26",
        about="a bit flips in a parameter",
        faults=(f"flip rank=1 step={AT}",),
        ci=True,
        named=r"rank.*differ",
        tests=(
            "tests/ranks/test_agreement.py::test_two_hundred_flipped_bits_are_all_found_and_named",
            "tests/procs/test_elastic.py::test_a_rank_whose_state_has_drifted_is_replaced",
            "tests/procs/test_elastic.py::test_two_ranks_that_have_drifted_go_back_to_what_was_saved_before",
        ),
    ),
    Case(
        id="F27",
        about="a gradient is wrong on one rank",
        tests=("tests/procs/test_audit.py::test_the_rank_is_named_and_others_are_not",),
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
        ci=True,
        tests=(
            "tests/procs/test_checked.py",
            "tests/procs/test_faults.py",
            "tests/procs/test_waits.py",
            "tests/procs/test_shm.py::test_ranks_that_differ_all_learn_it_and_go_on",
        ),
    ),
    Case(
        id="F30",
        about="uneven data",
        tests=(
            "tests/procs/test_replica.py::test_uneven_inputs_as_torch_does",
            "tests/procs/test_data_ranks.py::test_a_tail_too_short_for_all_ranks_hangs_nobody",
        ),
    ),
    Case(
        id="F31",
        about="a DataLoader worker is killed, another stopped",
        workers=1,
        named=r"DataLoader worker",
        faults=(f"kill-worker rank=1 step={AT}", f"stop-worker rank=0 step={AT + 20}"),
        tests=("tests/procs/test_data_workers.py",),
    ),
    Case(
        id="F32",
        about="out of memory",
        tests=("tests/procs/test_launch.py::test_the_kernel_killing_for_memory_is_told",),
    ),
    Case(
        id="F33",
        about="ports taken, strangers",
        tests=(
            "tests/procs/test_start.py",
            "tests/procs/test_launch.py::test_a_port_in_use_is_one_line",
            "tests/procs/test_strangers.py",
        ),
    ),
    Case(
        id="F34",
        about="a rank never comes",
        tests=("tests/procs/test_start.py::test_missing_ranks_are_named_on_every_rank",),
    ),
    Case(id="F35", about="a clock that is an hour off", clock=3600.0),
    Case(
        id="F36",
        about="fewer ranks, and more again",
        ci=True,
        tests=(
            "tests/procs/test_elastic_launch.py",
            "tests/procs/test_train_lanes.py::test_every_world_and_every_resume_gives_the_same_bits",
        ),
    ),
    Case(
        id="F37",
        about="no more open files",
        faults=(f"no-files rank=1 step={AT}",),
        equal=False,
        named="",
        tests=("tests/procs/test_launch.py::test_too_few_open_files_are_one_line",),
    ),
    Case(
        id="F38",
        about="one thing after the other",
        ranks=3,
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
    ),
)
