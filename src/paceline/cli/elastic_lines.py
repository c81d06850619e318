"""The messages of an elastic job: a line per loss, a line per generation, and a summary at the end."""

from paceline.launch import Formed, Loss
from paceline.member_messages import NEVER


class ElasticLines:
    """Makes the lines, and keeps counts for the summary."""

    def __init__(self) -> None:
        self._losses = 0
        self._generations = 0
        self._joined = 0
        self._between_s: list[float] = []

    def lost(self, loss: Loss) -> str:
        """The rank that was lost, why, and at which step."""
        self._losses += 1
        if loss.rank == NEVER:
            return f"a process in slot {loss.slot}, which had no rank yet, {loss.cause}"
        slot = "" if loss.slot == loss.rank else f" (slot {loss.slot})"
        step = "" if loss.step == NEVER else f" (at step {loss.step})"
        return f"rank {loss.rank}{slot} {loss.cause}{step}"

    def formed(self, formed: Formed) -> str:
        """The number of ranks, the state from which they continue, and how long that took."""
        generation = formed.generation
        self._generations += 1
        ranks = "1 rank" if generation.size == 1 else f"{generation.size} ranks"
        if generation.number == 0:
            return f"generation 0: {ranks} after {formed.took_s:.1f} s"
        self._joined += formed.joined
        self._between_s.append(formed.took_s)
        new = f" ({formed.joined} new)" if formed.joined else ""
        start = f"from step {generation.step}" if generation.sources else "from the newest checkpoint"
        go = "goes" if generation.size == 1 else "go"
        return f"generation {generation.number}: {ranks}{new} {go} on {start} after {formed.took_s:.2f} s"

    def summary(self) -> list[str]:
        """The summary; empty if no rank was lost."""
        if not self._losses:
            return []
        lost = "1 rank was lost" if self._losses == 1 else f"{self._losses} ranks were lost"
        between = f"{self._generations} generations, {sum(self._between_s):.2f} s between them"
        return [f"{lost} and {self._joined} joined later; {between}"]
