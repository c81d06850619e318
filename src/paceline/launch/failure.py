"""From how each rank ended to why the job failed: first cause first, one error of many ranks once."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.launch.job import INTERRUPT_EXIT, WATCHDOG_EXIT, Failure
from paceline.launch.lines import spans
from paceline.launch.tracebacks import Traceback, cut, last_traceback, thread_stack, wrapped
from paceline.launch.watchdog import Hang

MAX_OTHERS = 2
# What a rank says that fell because another one did. It is never shown as the cause when there is a better one.
_FOLLOWS = re.compile(
    r"PeerLost|PeerAbsent|BackwardAborted|WorldNotFormed|DistNetworkError|DistStoreError|"
    r"connection (was )?closed|connection reset|connection refused|broken pipe|socket closed|remote process exited|"
    r"communicator was aborted|got 0 bytes|recvvalue failed|sendbytes failed|recvbytes failed|"
    r"\bgloo\b.*timed? ?out|wait timeout after|socket timeout",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class End:
    """How one rank ended. `at` is when it did, or wrote its last traceback; `asked` is whether it was told to."""

    rank: int
    at: float
    code: int = 0
    killed_by: int = 0
    asked: bool = False
    never: str = ""
    out_of_memory: bool = False
    raised: bool = False  # its last words are a traceback that it has not caught
    tail: tuple[str, ...] = field(default=(), repr=False)
    step: int | None = None

    @property
    def failed(self) -> bool:
        """Whether it ended in a bad way of its own. A rank that obeys a signal has not failed."""
        return bool(self.code or self.killed_by) and not self.asked

    @property
    def exit_code(self) -> int:
        return 128 + self.killed_by if self.killed_by else self.code


def judge(ends: Sequence[End], hang: Hang | None = None, first_rank: int = 0) -> Failure | None:
    """Why the job failed; None when no rank did. `hang` names local ranks that the watchdog found."""
    if hang is not None:
        return _judge_hang(ends, hang, first_rank)
    failed = sorted((end for end in ends if end.failed), key=lambda end: (follows(end), end.at))
    if not failed:
        return None
    first = failed[0]
    same = [end for end in failed if _signature(end) == _signature(first)]
    ranks = tuple(sorted(end.rank for end in same))
    kind, what, lines = _explain(first, len(same))
    texts = {_message(end) for end in same}
    if len(texts) > 1:
        lines = (*lines, f"(the text differs between these ranks; this is rank {first.rank}'s)")
    return Failure(
        ranks=ranks,
        kind=kind,
        exit_code=first.exit_code,
        summary=f"{_name_ranks(ranks)} {what}",
        details=lines,
        others=_others([end for end in failed if end not in same]),
        step=first.step,
        follows=follows(first),
    )


def follows(end: End) -> bool:
    """Whether this rank fell because another one did, as far as its last words tell."""
    found = _traceback(end)
    if found is not None:
        return all(_FOLLOWS.search(reason) for reason in found.reasons)
    return end.killed_by == signal.SIGABRT and bool(_FOLLOWS.search(" ".join(end.tail[-8:])))


def _judge_hang(ends: Sequence[End], hang: Hang, first_rank: int) -> Failure:
    ranks = tuple(first_rank + local for local in hang.ranks)
    word = {"frozen": "froze", "spinning": "spins without getting on"}[hang.kind]
    if len(ranks) > 1 and hang.kind == "spinning":
        word = "spin without getting on"
    stack = next((found for end in ends if end.rank in ranks and (found := thread_stack(end.tail))), ())
    return Failure(
        ranks=ranks,
        kind=hang.kind,
        exit_code=WATCHDOG_EXIT,
        summary=f"{_name_ranks(ranks)} {word}: {hang.reason}, at step {hang.step}",
        details=stack,
        step=hang.step,
    )


def _explain(end: End, ranks: int = 1) -> tuple[str, str, tuple[str, ...]]:
    """The kind of failure, what so many ranks did, and the lines that show it."""
    verb = "was" if ranks == 1 else "were"
    if end.never:
        return "never started", f"never started: {end.never}", ()
    if end.out_of_memory:
        why = "killed by the kernel for want of memory (SIGKILL, and the oom_kill counter went up)"
        return "memory", f"{verb} {why}", ()
    found = _traceback(end)
    if found is not None:
        message, *rest = wrapped(found.message[0])
        return "exception", f"raised {message}", (*rest, *found.details(len(rest)))
    if end.killed_by:
        name = signal_name(end.killed_by)
        return "signal", f"{verb} ended by {name}", thread_stack(end.tail) or _last_words(end.tail, 4)
    return "exit", f"exited with code {end.code}", _last_words(end.tail, 6)


def _others(ends: Sequence[End]) -> tuple[str, ...]:
    """A line for each way in which others fell after the first."""
    ways: dict[str, list[End]] = {}
    for end in ends:
        found = _traceback(end)
        way = found.name.rpartition(".")[2] if found else _explain(end)[1]
        ways.setdefault(cut(way, 100), []).append(end)
    lines = []
    for way, same in ways.items():
        text = way if _traceback(same[0]) else cut(_explain(same[0], len(same))[1], 100)
        lines.append(f"afterwards {_name_ranks([end.rank for end in same])}: {text}")
    if len(lines) > MAX_OTHERS:
        lines = [*lines[: MAX_OTHERS - 1], f"afterwards {len(lines) - MAX_OTHERS + 1} more kinds of failure"]
    return tuple(lines)


def _signature(end: End) -> object:
    """Equal for failures that are to be shown once."""
    found = _traceback(end)
    if end.never or end.out_of_memory or found is None:
        return end.never, end.out_of_memory, end.killed_by, end.code
    return found.frames, found.name


def _message(end: End) -> tuple[str, ...]:
    found = _traceback(end)
    return found.message + found.parts if found else ()


def _traceback(end: End) -> Traceback | None:
    """The traceback with which a rank ended."""
    return None if end.killed_by or not end.raised else last_traceback(end.tail)


def _last_words(tail: Sequence[str], count: int) -> tuple[str, ...]:
    return tuple(cut(line, 200) for line in [line for line in tail if line.strip()][-count:])


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {spans(ranks)}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def interrupted(name: str, code: int = INTERRUPT_EXIT) -> Failure:
    """A job that someone ended from outside has no rank at fault."""
    return Failure(ranks=(), kind="signal", exit_code=code, summary=f"ended by {name} to the launcher")
