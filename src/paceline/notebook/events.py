"""What happens on the ranks while a cell runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Wrote:
    """Text that a rank wrote: any number of lines, or a part of one. `stream` is "stdout" or "stderr"."""

    rank: int
    stream: str
    text: str


@dataclass(frozen=True, slots=True)
class Showed:
    """One output in several MIME types: a figure, a table, the value of the cell's last line."""

    rank: int
    data: Mapping[str, Any]
    metadata: Mapping[str, Any]
    display_id: str | None = None
    updates: bool = False  # replaces what was shown under `display_id`


@dataclass(frozen=True, slots=True)
class Cleared:
    """The rank asked to clear what it has shown in this cell; `waits` until it shows something new."""

    rank: int
    waits: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The cell raised on a rank. `traceback` is IPython's, with its colours."""

    rank: int
    name: str
    value: str
    traceback: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Died:
    """A rank's process ended. `how`: "was killed by SIGKILL", "exited with 1". `last_lines`: its last lines."""

    rank: int
    how: str
    last_lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """A rank has finished the cell, with or without an error."""

    rank: int


@dataclass(frozen=True, slots=True)
class Noticed:
    """A message from paceline while the cell runs."""

    text: str


Event = Wrote | Showed | Cleared | Failed | Died | Ended | Noticed


class View(Protocol):
    """Where the events of one cell are shown. Called on the thread that runs the cell."""

    def take(self, event: Event, now: float) -> None: ...

    def tick(self, now: float) -> None:
        """Called at least every 50 ms, so that lines which waited for equal ones are shown."""

    def close(self, now: float) -> None:
        """The cell is over: show all that is still held back."""
