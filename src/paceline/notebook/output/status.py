"""Ranks as the user sees them: the tree of `%dist_status`, and the startup."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from paceline.launch.tracebacks import cut
from paceline.notebook.output.display import IPythonDisplay
from paceline.notebook.rank_kernels.connection import RankFacts, RankState
from paceline.notebook.rank_kernels.startup import STARTUP, StartupProgress

MAX_SOURCE = 60
_MARKS = {RankState.IDLE: "✓", RankState.BUSY: "●", RankState.DEAD: "✗"}


def tree(facts: Sequence[RankFacts], answers: Mapping[int, Mapping[str, Any]]) -> str:
    """One branch per rank. `answers` holds what ranks replied to "facts"; a rank that did not reply is missing."""
    alive = sum(fact.state is not RankState.DEAD for fact in facts)
    dead = f", {len(facts) - alive} dead" if alive < len(facts) else ""
    lines = [f"{len(facts)} rank{'' if len(facts) == 1 else 's'}{dead}{_versions(facts)}"]
    for fact in facts:
        answer = answers.get(fact.rank, {})
        answered = answer.get("status", "ok") == "ok" and bool(answer)
        lines.append(f"Rank {fact.rank}: {_MARKS.get(fact.state, '…')} PID {fact.pid}")
        leaves = [_device(fact), *(_memory(answer) if answered else ()), f"State: {_state(fact, answer, answered)}"]
        lines += [f"  ├─ {leaf}" for leaf in leaves[:-1]]
        lines.append(f"  └─ {leaves[-1]}")
    return "\n".join(lines)


def _versions(facts: Sequence[RankFacts]) -> str:
    """All ranks are started by the same Python."""
    known = next((fact for fact in facts if fact.torch), None)
    return f" · Python {known.python} · torch {known.torch}" if known else ""


def _device(fact: RankFacts) -> str:
    if fact.gpu_id is None:
        return "Device: CPU" if fact.device == "cpu" else f"Device: {fact.device}"
    return f"GPU: {fact.gpu_id} ({fact.device})"


def _memory(answer: Mapping[str, Any]) -> list[str]:
    found = []
    if "gpu_bytes" in answer:
        used = answer["gpu_bytes"] - answer["gpu_free_bytes"]
        # What torch holds is this rank's; what is used on the device includes other processes.
        found.append(
            f"GPU memory: {amount(answer['gpu_allocated_bytes'])} in tensors, "
            f"{amount(answer['gpu_reserved_bytes'])} held by torch; "
            f"device: {amount(used)} of {amount(answer['gpu_bytes'])} used"
        )
    if "rss_bytes" in answer:
        found.append(f"Memory: {amount(answer['rss_bytes'])}")
    return found


def _state(fact: RankFacts, answer: Mapping[str, Any], answered: bool) -> str:
    if fact.state is RankState.DEAD:
        return f"dead: {fact.died or 'it ended'}; %dist_restart {fact.rank} brings it back"
    if answer.get("status") == "error":
        error = cut(f"{answer.get('ename')}: {answer.get('evalue')}", 160)
        return f"{fact.state.value}, asking it failed: {error}"
    if not answered and fact.state not in STARTUP:
        return f"{fact.state.value}, does not answer"
    if fact.state is not RankState.BUSY:
        return str(fact.state.value)
    line = answer.get("line")
    source = f": {cut(answer['source'], MAX_SOURCE)}" if answer.get("source") else ""
    where = f", line {line}{source}" if line is not None else ""
    waits = f", waits in {answer['waits_in']}" if answer.get("waits_in") else ""
    return f"busy{where}{waits}"


def amount(count: int) -> str:
    """`1.5 GiB`."""
    if count < 1 << 30:
        return f"{count / (1 << 20):.0f} MiB"
    return f"{count / (1 << 30):.1f} GiB"


WIDTH = 12  # of a bar


@contextmanager
def startup_display() -> Iterator[Callable[[StartupProgress], None]]:
    """Yields a function that shows the progress of a startup, in place where the display allows it."""
    display, name = IPythonDisplay(), f"paceline-startup-{uuid4().hex}"
    yield lambda progress: display.live(name, draw_startup(progress))
    display.settle(name)


def draw_startup(progress: StartupProgress) -> str:
    """A line for every rank with a bar, and a summary below them."""
    lines = []
    ready = [facts.state not in STARTUP for facts in progress.ranks]
    for facts, is_ready in zip(progress.ranks, ready, strict=True):
        done = len(STARTUP) if is_ready else STARTUP.index(facts.state)
        bar = "━" * (WIDTH * (done + 1) // (len(STARTUP) + 1))
        where = facts.device if facts.gpu_id is None else f"GPU {facts.gpu_id} ({facts.device})"
        text = f"ready → {where}, pid {facts.pid}" if is_ready else facts.state.value
        lines.append(f"rank {facts.rank}  {bar:<{WIDTH}}  {text}")
    if all(ready):
        count = f"{len(progress.ranks)} rank{'s' if len(progress.ranks) > 1 else ''}"
        torch = "".join(f", torch {facts.torch}" for facts in progress.ranks[:1] if facts.torch)
        lines.append(f"{count} in {progress.seconds:.1f} s{torch}")
        lines.append("Plain cells run on all of them; %%rank [0] chooses, %%local stays here.")
    if progress.note:
        lines.append(progress.note)
    return "\n".join(lines)
