"""Why a job failed, from how each rank exited: the root cause first, and an error that many ranks raise only once."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from paceline.launch.job import WATCHDOG_EXIT, JobFailure
from paceline.launch.lines import name_ranks
from paceline.launch.tracebacks import Section, cut, last_traceback, main_stack, thread_stack, wrapped
from paceline.launch.watchdog import Hang
from paceline.process_status import signal_name

MAX_OTHERS = 2
# Text written by ranks that failed because another one did. It is not shown as the cause if there is a better one.
_FOLLOWS = re.compile(
    r"PeerLost|PeerAbsent|BackwardAborted|WorldNotFormed|DistNetworkError|DistStoreError|"
    r"connection (was )?closed|connection reset|connection refused|broken pipe|socket closed|remote process exited|"
    r"communicator was aborted|got 0 bytes|recvvalue failed|sendbytes failed|recvbytes failed|"
    r"\bgloo\b.*timed? ?out|wait timeout after|socket timeout",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class End:
    """How one rank exited. `at` is the time of the exit or of its last traceback; `asked`: it was asked to exit."""

    rank: int
    at: float
    code: int = 0
    killed_by: int = 0
    asked: bool = False
    never: str = ""
    out_of_memory: bool = False
    lost: str = ""  # the machine, and why
    raised: bool = False  # its output ends with a traceback that it has not caught
    tail: tuple[str, ...] = field(default=(), repr=False)

    @property
    def failed(self) -> bool:
        """Whether it failed on its own. A rank that obeys a signal has not failed."""
        return bool(self.code or self.killed_by) and not self.asked

    @property
    def exit_code(self) -> int:
        return 128 + self.killed_by if self.killed_by else self.code

    @cached_property
    def traceback(self) -> Section | None:
        """The traceback that ended the rank, if one did."""
        return None if self.killed_by or not self.raised else last_traceback(self.tail)


def root_cause(ends: Sequence[End], hang: Hang | None = None) -> JobFailure | None:
    """Why the job failed; None when no rank did. `hang` is what the watchdog found."""
    if hang is not None:
        return _hang_failure(ends, hang)
    failed = sorted((end for end in ends if end.failed), key=lambda end: (follows(end), end.at))
    if not failed:
        return None
    first = failed[0]
    same = [end for end in failed if _signature(end) == _signature(first)]
    ranks = tuple(sorted(end.rank for end in same))
    what, lines = _explain(first)
    if len({_message(end) for end in same}) > 1:
        lines = (*lines, f"(the text differs between these ranks; this is rank {first.rank}'s)")
    return JobFailure(
        ranks=ranks,
        exit_code=first.exit_code,
        summary=_said_of(ranks, what),
        details=lines,
        others=_others([end for end in failed if end not in same]),
    )


def follows(end: End) -> bool:
    """Whether this rank failed because another one did, judging by its last output."""
    if end.traceback is not None:
        return all(names_a_peer_failure(reason) for reason in end.traceback.reasons)
    return end.killed_by == signal.SIGABRT and names_a_peer_failure(" ".join(end.tail[-8:]))


def names_a_peer_failure(message: str) -> bool:
    """Whether an error message says that another rank has died."""
    return bool(_FOLLOWS.search(message))


def cause_of(end: End) -> str:
    """How a rank ended, as text that continues "rank 1 "."""
    if end.traceback is not None:
        return cut(f"raised {end.traceback.message[0]}", 300)
    return _explain(end)[0]


def _hang_failure(ends: Sequence[End], hang: Hang) -> JobFailure:
    ranks = hang.ranks
    stack = next((found for end in ends if end.rank in ranks and (found := main_stack(end.tail))), ())
    return JobFailure(
        ranks=ranks,
        exit_code=WATCHDOG_EXIT,
        summary=_said_of(ranks, f"{hang.how}: {hang.reason}" + (f", at step {hang.step}" if hang.step >= 0 else "")),
        details=stack,
    )


def _explain(end: End) -> tuple[str, tuple[str, ...]]:
    """How the rank ended, and the lines that show it."""
    if end.never:
        return f"never started: {end.never}", ()
    if end.lost:
        return f"was lost with {end.lost}", ()
    if end.out_of_memory:
        return "was killed by the OOM killer (SIGKILL, and the kernel's oom_kill counter increased)", ()
    if end.traceback is not None:
        message, *rest = wrapped(end.traceback.message[0])
        return f"raised {message}", (*rest, *end.traceback.details(len(rest)))
    if end.killed_by:
        stack = thread_stack(end.tail) or _last_lines(end.tail, 4)
        return f"was killed by {signal_name(end.killed_by)}", stack
    return f"exited with code {end.code}", _last_lines(end.tail, 6)


def _said_of(ranks: Sequence[int], what: str) -> str:
    """`rank 1 was killed`, `ranks 0-2 were killed`."""
    verb, _, rest = what.partition(" ")
    plural = {"was": "were", "is": "are"}.get(verb, verb)
    return f"{name_ranks(ranks)} {verb if len(ranks) == 1 else plural} {rest}"


def _others(ends: Sequence[End]) -> tuple[str, ...]:
    """A line for each way in which other ranks failed after the first."""
    ways: dict[str, list[int]] = {}
    for end in ends:
        way = f"raised {end.traceback.name.rpartition('.')[2]}" if end.traceback else _explain(end)[0]
        ways.setdefault(cut(way, 100), []).append(end.rank)
    lines = [f"afterwards {_said_of(ranks, way)}" for way, ranks in ways.items()]
    if len(lines) > MAX_OTHERS:
        lines = [*lines[: MAX_OTHERS - 1], f"followed by {len(lines) - MAX_OTHERS + 1} other kinds of failure"]
    return tuple(lines)


def _signature(end: End) -> object:
    """Equal for failures that should be shown once."""
    if end.never or end.lost or end.out_of_memory or end.traceback is None:
        return end.never, end.lost, end.out_of_memory, end.killed_by, end.code
    return end.traceback.frames, end.traceback.name


def _message(end: End) -> tuple[str, ...]:
    return end.traceback.message + end.traceback.parts if end.traceback else ()


def _last_lines(tail: Sequence[str], count: int) -> tuple[str, ...]:
    return tuple(cut(line, 200) for line in [line for line in tail if line.strip()][-count:])
