"""When to stop trying again: a step that fails in the same way in two generations will fail in a third."""

import re
from dataclasses import dataclass, field

TRIES = 2


@dataclass
class Retries:
    """The failures so far, by step and generation."""

    _seen: dict[tuple[int, str], set[int]] = field(default_factory=dict)

    def is_hopeless(self, generation: int, step: int, cause: str) -> bool:
        """Record a failure; return True if another try would be useless.

        Ranks that fail together count once: a file system that is briefly unavailable fails on all of them.
        """
        tried = self._seen.setdefault((step, kind_of(cause)), set())
        tried.add(generation)
        return len(tried) >= TRIES


def kind_of(cause: str) -> str:
    """The part of a cause without numbers and paths: an exception's name, or how a process died."""
    return re.split(r":\s", cause, maxsplit=1)[0]
