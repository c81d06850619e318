"""The tree of `%dist_status`: each rank with its process, device, memory, and what it does."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.launch.tracebacks import cut
from paceline.notebook.fleet.kernel import RankFacts, RankState

MAX_SOURCE = 60
_MARKS = {RankState.BOOTING: "…", RankState.IDLE: "✓", RankState.BUSY: "●", RankState.DEAD: "✗"}


def tree(facts: Sequence[RankFacts], answers: Mapping[int, Mapping[str, Any]]) -> str:
    """One branch per rank. `answers` are what ranks said to "facts"; one that is missing or failed did not answer."""
    alive = sum(fact.state is not RankState.DEAD for fact in facts)
    dead = f", {len(facts) - alive} dead" if alive < len(facts) else ""
    lines = [f"{len(facts)} rank{'' if len(facts) == 1 else 's'}{dead}{_versions(facts)}"]
    for fact in facts:
        answer = answers.get(fact.rank, {})
        answered = answer.get("status", "ok") == "ok" and bool(answer)
        lines.append(f"Rank {fact.rank}: {_MARKS[fact.state]} PID {fact.pid}")
        leaves = [_device(fact), *(_memory(answer) if answered else ()), f"State: {_state(fact, answer, answered)}"]
        lines += [f"  ├─ {leaf}" for leaf in leaves[:-1]]
        lines.append(f"  └─ {leaves[-1]}")
    return "\n".join(lines)


def _versions(facts: Sequence[RankFacts]) -> str:
    """Said once; all ranks are started by the same Python."""
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
        # What torch holds is this rank's; what is used on the device is everybody's.
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
    if not answered and fact.state is not RankState.BOOTING:
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
