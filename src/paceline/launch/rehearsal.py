"""The injected faults of a job: armed in its ranks, and counted as they happen, so that none happens too often."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline.errors import UsageError
from paceline.faults.fault import FAULTS_NAME, Fault, format_all, once_less, parse


class Rehearsal:
    """The remaining faults of a job. A restarted rank gets only these."""

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self.left = faults
        self._any = bool(faults)

    def on_report(self, kind: str, fields: Mapping[str, Any]) -> None:
        """A rank has reported something, perhaps that a fault is about to happen."""
        if kind == "fault":
            with suppress(UsageError):  # another program may write to the pipe: then no fault has happened
                self.left = once_less(self.left, parse(str(fields.get("fault"))))

    def environment(self) -> dict[str, str]:
        """The variables that arm a rank. They replace the launcher's own, even if nothing is left."""
        return {FAULTS_NAME: format_all(self.left)} if self._any else {}

    def unmet(self) -> str:
        """The message about faults that have not happened by the end of the job."""
        if not self.left:
            return ""
        named = "; ".join(map(str, self.left))
        return (
            f"faults that never happened: {named}. A fault happens where a rank's progress is noted: in a replica's "
            f"forward, backward and update, in a Checkpointer and a Loader; see docs/faults.md"
        )
