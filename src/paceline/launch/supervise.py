"""`supervise`: all attempts of a job, on this machine and in step with the others."""

import signal

from paceline.errors import PacelineError
from paceline.launch.attempt import Attempt, Result
from paceline.launch.failure import interrupted
from paceline.launch.job import INTERRUPT_EXIT, Failure, HearsNotes, Job, Listener, Outcome
from paceline.launch.nodes import Nodes, meet_nodes
from paceline.launch.requests import Requests


class _Ended(PacelineError):
    """A signal came while the launcher waited for other machines."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def supervise(job: Job, listener: Listener) -> Outcome:
    """Run a job to its end: start its ranks, watch them, and start them anew as often as the job allows.

    Signals that come to this process meanwhile are passed on to the ranks, if it is called in the main thread. When it
    returns, or when this process dies in whatever way, no process of the job is left on this machine.
    """
    note = listener.note if isinstance(listener, HearsNotes) else _say_nothing
    with Requests() as requests:
        nodes = meet_nodes(job, note)
        try:
            return _attempts(job, listener, requests, nodes)
        finally:
            nodes.close()


def _attempts(job: Job, listener: Listener, requests: Requests, nodes: Nodes) -> Outcome:
    def patience() -> None:
        number = requests.next()
        if number is not None and number != signal.SIGUSR1:
            raise _Ended(number)

    attempt = 0
    try:
        while True:
            seat = nodes.begin(attempt, patience)
            result = Attempt(job, seat, listener, requests, nodes).run()
            again = attempt < job.max_restarts and not result.signal and result.exit_code not in job.final_codes
            verdict = nodes.settle(_told_to_others(result), again, patience)
            if not verdict.again or verdict.failure is None:
                return _outcome(result, verdict.failure, attempt)
            attempt += 1
            listener.restarting(attempt, verdict.failure)
    except _Ended as ended:
        failure = interrupted(str(ended), _code_of(ended.number))
        return Outcome(failure.exit_code, failure, attempt, str(ended))


def _told_to_others(result: Result) -> Failure | None:
    if result.failure is None and result.exit_code:
        return interrupted(signal.Signals(result.signal).name, result.exit_code)
    return result.failure


def _outcome(result: Result, failure: Failure | None, restarts: int) -> Outcome:
    name = signal.Signals(result.signal).name if result.signal else ""
    if result.signal:
        return Outcome(result.exit_code, result.failure, restarts, name)
    return Outcome(0 if failure is None else failure.exit_code or 1, failure, restarts)


def _code_of(number: int) -> int:
    return INTERRUPT_EXIT if number == signal.SIGINT else 128 + number


def _say_nothing(_text: str) -> None:
    """A listener without `note` does not want to know."""
