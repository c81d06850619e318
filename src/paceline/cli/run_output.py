"""What `paceline run` shows: lines of ranks, marked with the rank and folded if equal, and its own messages."""

import os
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from paceline.cli.elastic_lines import ElasticLines
from paceline.launch import Fold, Formed, Job, JobFailure, JobOutcome, Listener, Loss, spans

_COLOURS = (36, 33, 32, 35, 34, 31)
OUT, ERR = 1, 2


class RunOutput(Listener):
    """A listener that writes plain lines, with colours on a terminal."""

    def __init__(
        self, job: Job, hidden: Sequence[int], *, out: TextIO | None = None, err: TextIO | None = None
    ) -> None:
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._hidden = hidden  # of each rank: OUT, ERR or both
        self._fold = Fold(self._write, job.ranks)
        self._elastic = ElasticLines()
        self._closed: set[TextIO] = set()

    def line(self, rank: int, text: str) -> None:
        self._add(rank, text, OUT)

    def error_line(self, rank: int, text: str) -> None:
        self._add(rank, text, ERR)

    def restarting(self, attempt: int, failure: JobFailure) -> None:
        self._flush()
        self.note(f"{failure}; restart {attempt}: all ranks start again")

    def lost(self, loss: Loss) -> None:
        self._flush()
        self.note(self._elastic.lost(loss))

    def formed(self, formed: Formed) -> None:
        self.note(self._elastic.formed(formed))

    def tick(self) -> None:
        self._fold.flush(time.monotonic())

    def note(self, text: str) -> None:
        """A message of the launcher itself."""
        self._put(self._err, _paint(self._err, 2, f"paceline run: {text}") + "\n")

    def conclude(self, job: Job, outcome: JobOutcome) -> None:
        """Say how the job ended, unless it ended well; of an elastic job, also what it has lost."""
        for text in self._elastic.summary():
            self.note(text)
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
        """Write what still waits to be folded."""
        self._flush()

    def _add(self, rank: int, text: str, channel: int) -> None:
        if not self._hidden[rank] & channel:
            self._fold.add(rank, (text, channel), time.monotonic())

    def _flush(self) -> None:
        self._fold.flush(float("inf"))

    def _write(self, ranks: tuple[int, ...], line: tuple[str, int]) -> None:
        text, channel = line
        stream = self._out if channel == OUT else self._err
        colour = _COLOURS[ranks[0] % len(_COLOURS)] if len(ranks) == 1 else 1
        self._put(stream, f"{_paint(stream, colour, f'[{spans(ranks)}]')} {text}\n")

    def _put(self, stream: TextIO, text: str) -> None:
        if stream in self._closed:
            return
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:
            # The reader has exited, as `| head` does, or the disk is full; the ranks continue, and their logs are
            # complete. Python would complain once more when it flushes at exit.
            self._closed.add(stream)
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if not isinstance(error, BrokenPipeError):
                self.note(f"output can no longer be shown: {error.strerror}; the logs are complete")


def _paint(stream: TextIO, colour: int, text: str) -> str:
    if not stream.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"
