"""When to stop trying again: a step that fails in the same way in two generations fails in a third."""

import re
from dataclasses import dataclass, field

TRIES = 2


@dataclass
class Retries:
    """What has failed, at which step, in which generations."""

    _seen: dict[tuple[int, str], set[int]] = field(default_factory=dict)

    def is_hopeless(self, generation: int, step: int, cause: str) -> bool:
        """Note a failure; say whether there is no use in another try.

        Ranks that fail together count once: a file system that was away for a moment fails on all of them.
        """
        tried = self._seen.setdefault((step, kind_of(cause)), set())
        tried.add(generation)
        return len(tried) >= TRIES


def kind_of(cause: str) -> str:
    """What is the same where texts differ in a number or a path: an exception's name, or how a process died."""
    return re.split(r":\s", cause, maxsplit=1)[0]
