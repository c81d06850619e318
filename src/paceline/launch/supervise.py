"""Runs a job: its first attempt, and restarts after failures."""

import resource

from paceline.errors import UsageError
from paceline.launch.attempt import Attempt
from paceline.launch.job import Job, JobOutcome, Listener
from paceline.launch.rank_engine import RankEngine, ThisMachine
from paceline.launch.rank_environment import reserve_port
from paceline.launch.rehearsal import Rehearsal
from paceline.launch.signals import PendingSignals

# Open files of a launcher: three or four pipes and a log for each rank, and some of its own.
FILES_PER_RANK = 5
OWN_FILES = 24


def supervise(job: Job, listener: Listener, engine: RankEngine | None = None) -> JobOutcome:
    """Run a job to its end: start its ranks, watch them, and restart them as often as the job allows.

    Signals to this process are forwarded to the ranks if it is called in the main thread. When it returns, or when this
    process dies, no process of the job is left on this machine, or on those of another `engine`.
    """
    _check_open_files(job.slots)
    rehearsal = Rehearsal(job.faults)
    engine = engine or ThisMachine()
    with PendingSignals() as signals:
        for attempt in range(job.max_restarts + 1):
            # A restart uses another port: processes may still be connected to the old one.
            with reserve_port(0 if attempt else job.master_port) as port:
                outcome = Attempt(job, attempt, port.getsockname()[1], listener, signals, rehearsal, engine).run()
            final = outcome.final or outcome.signal or outcome.exit_code in job.final_codes
            if final or attempt == job.max_restarts or outcome.failure is None:
                break
            listener.restarting(attempt + 1, outcome.failure)
    if unmet := rehearsal.unmet():
        listener.note(unmet)
    return outcome


def _check_open_files(ranks: int) -> None:
    needed, limit = FILES_PER_RANK * ranks + OWN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UsageError(
            f"{ranks} ranks need {needed} open files in their launcher, and the limit is {limit}; raise it with "
            f"`ulimit -n {max(1024, needed)}`, or start fewer ranks"
        )
