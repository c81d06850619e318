"""What `paceline run` shows: lines of ranks with a gutter, folded where ranks say the same, and its own words."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from paceline.launch import Failure, Fold, Job, Outcome, spans

_COLOURS = (36, 33, 32, 35, 34, 31)
OUT, ERR = 1, 2


class Screen:
    """A listener that writes plain lines; with colours where somebody looks."""

    def __init__(
        self,
        job: Job,
        *,
        shown: Callable[[int], bool] = lambda _: True,
        hidden: Callable[[int], int] = lambda _: 0,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._shown, self._hidden = shown, hidden
        self._first_rank = 0
        self._fold = Fold(self._write, job.ranks)
        self._closed = False

    def line(self, rank: int, text: str) -> None:
        self._add(rank, text, OUT)

    def error_line(self, rank: int, text: str) -> None:
        self._add(rank, text, ERR)

    def told(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        """What ranks tell is for launchers that draw it; only where this machine's ranks begin is of use here."""
        if kind == "placed":
            self._first_rank = fields["first_rank"]

    def restarting(self, attempt: int, failure: Failure) -> None:
        self._flush()
        self.note(f"{failure}; restart {attempt}: all ranks start again")

    def tick(self) -> None:
        self._fold.flush(time.monotonic())

    def note(self, text: str) -> None:
        """A line of the launcher's own."""
        self._put(self._err, _paint(self._err, 2, f"paceline run: {text}") + "\n")

    def conclude(self, job: Job, outcome: Outcome) -> None:
        """The launcher's last words, if there is something to say."""
        if outcome.failure is not None and outcome.failure.ranks:
            self._fail([*outcome.failure.lines(), f"full logs: {job.run_dir}/rank_*.log"])
        elif outcome.failure is not None:
            self.note(str(outcome.failure))
        elif outcome.signal:
            self.note(f"ended by {outcome.signal}; logs: {job.run_dir}")

    def _fail(self, lines: Sequence[str]) -> None:
        first, *rest = lines
        self._put(self._err, _paint(self._err, 31, f"paceline run: {first}") + "\n" + "".join(f"{x}\n" for x in rest))

    def close(self) -> None:
        """Let out what still waits to be folded."""
        self._flush()

    def _add(self, rank: int, text: str, channel: int) -> None:
        local = rank - self._first_rank
        if self._shown(local) and not self._hidden(local) & channel:
            self._fold.add(rank, text, time.monotonic(), channel)

    def _flush(self) -> None:
        self._fold.flush(float("inf"))

    def _write(self, ranks: tuple[int, ...], text: str, channel: int) -> None:
        stream = self._out if channel == OUT else self._err
        colour = _COLOURS[ranks[0] % len(_COLOURS)] if len(ranks) == 1 else 1
        self._put(stream, f"{_paint(stream, colour, f'[{spans(ranks)}]')} {text}\n")

    def _put(self, stream: TextIO, text: str) -> None:
        if self._closed:
            return
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:
            # Whoever read it has gone, as `| head` does; the ranks go on, and their logs are complete. Python would
            # complain once more when it flushes at exit.
            self._closed = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _paint(stream: TextIO, colour: int, text: str) -> str:
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"
