"""The sample log: the samples that were trained on, written by every rank at every step, and a report on them.

A folder holds one file per session and rank, of JSON lines. A session is one stretch of steps without a jump: each
start or resume begins a new one and records its cursor. What earlier sessions wrote past that cursor was undone by
the resume, and the report leaves it out.
"""

import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.data.cursor import Cursor
from paceline.errors import IllegalMove, Malformed, PacelineError, UsageError
from paceline.stored.directory import open_to_write
from paceline.typed_json import read_json, typed

_LINE: Any = dict[str, Any]
_NAME = re.compile(r"session-(\d{6})-rank-(\d{5})\.jsonl")


class SampleLogDamaged(PacelineError, RuntimeError):
    """The folder of a sample log holds something that SampleLog did not write."""


@dataclass(frozen=True, slots=True)
class SampleLogEntry:
    """The samples of one rank in one step: `ids`, from the range `start` to `stop` of the epoch's order."""

    step: int
    rank: int
    epoch: int
    start: int
    stop: int
    ids: tuple[int, ...]
    session: int = 0


@dataclass(frozen=True, slots=True)
class SampleLogSession:
    """One stretch of steps: it began at `cursor`, with `world_size` ranks."""

    number: int
    cursor: Cursor
    world_size: int
    resumed: bool


class SampleLog:
    """Writes one line per step. Give it to a Loader, or call `begin` and `record` yourself.

    Every line is passed to the operating system at once, so it survives the end of the process.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._file: int | None = None
        self._session = 0

    def newest(self) -> int:
        """The number of the newest session in the folder, 0 if there is none."""
        return max((number for number, _, _ in _files(self.folder)), default=0)

    def begin(self, cursor: Cursor, rank: int, world_size: int, *, session: int | None = None, resumed: bool) -> None:
        """Start a session. All ranks must pass the same number; without one, ranks that start at the same position find
        each other."""
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        header = SampleLogSession(0, cursor, world_size, resumed)
        self._session = self._join(header, rank) if session is None else session
        path = self.folder / f"session-{self._session:06d}-rank-{rank:05d}.jsonl"
        try:
            self._file = open_to_write(path, append=True, new=True)
        except FileExistsError:
            raise SampleLogDamaged(
                f"{path} exists already: another process writes this sample log as rank {rank}; give each run "
                f"a folder of its own"
            ) from None
        said = {"cursor": asdict(cursor), "world_size": world_size, "resumed": resumed}
        self._write({"session": self._session, "rank": rank, **said})

    def record(self, entry: SampleLogEntry) -> None:
        """Write one line."""
        line = {name: getattr(entry, name) for name in ("step", "rank", "epoch", "start", "stop")}
        self._write({**line, "ids": list(entry.ids)})

    def close(self) -> None:
        """Close the file of the session. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> "SampleLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            raise IllegalMove("the sample log has no session; call begin() before record()")
        text = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        written = os.write(self._file, text)
        if written < len(text):
            raise OSError(f"only {written} of {len(text)} bytes of a line were written to {self.folder}")

    def _join(self, header: SampleLogSession, rank: int) -> int:
        """The newest session if it began with the same header and lacks this rank, else the next number."""
        newest = self.newest()
        files = {found: path for number, found, path in _files(self.folder) if number == newest}
        if files and rank not in files and all(_begins_like(path, header) for path in files.values()):
            return newest
        return newest + 1


@dataclass(frozen=True)
class SampleLogReport:
    """The contents of all sessions of a folder, without what resumes have undone."""

    entries: list[SampleLogEntry] = field(default_factory=list)
    sessions: list[SampleLogSession] = field(default_factory=list)
    undone: list[SampleLogEntry] = field(default_factory=list)
    torn: list[Path] = field(default_factory=list)  # files whose last line was cut off by a crash

    def counts(self, epoch: int) -> Counter[int]:
        """How often each sample was trained on in an epoch."""
        return Counter(index for entry in self.entries if entry.epoch == epoch for index in entry.ids)

    def problems(self) -> list[str]:
        """A sentence for each gap, overlap, missing share or repeated sample: every violation of "exactly once"."""
        return [problem for epoch in sorted({entry.epoch for entry in self.entries}) for problem in self._of(epoch)]

    def _of(self, epoch: int) -> Iterator[str]:
        steps: defaultdict[tuple[int, int], list[SampleLogEntry]] = defaultdict(list)
        for entry in self.entries:
            if entry.epoch == epoch:
                steps[entry.start, entry.session].append(entry)
        done = 0
        for (start, _), entries in sorted(steps.items()):
            # At the end of an epoch a rank may have no share, and so end one step before the others.
            stop = max(entry.stop for entry in entries)
            dealt = sum(len(entry.ids) for entry in entries)
            if start > done:
                yield f"epoch {epoch}: no rank trained on positions {done} to {start - 1} of its order"
            if start < done:
                yield f"epoch {epoch}: positions {start} to {min(done, stop) - 1} of its order were used twice"
            if dealt != stop - start:
                yield f"epoch {epoch}: positions {start} to {stop - 1} hold {stop - start} samples, ranks took {dealt}"
            done = max(done, stop)
        twice = sorted(index for index, times in self.counts(epoch).items() if times > 1)
        if twice:
            yield f"epoch {epoch}: {len(twice)} samples were trained on more than once, the first is {twice[0]}"


def read_sample_log(folder: str | Path) -> SampleLogReport:
    """Read what all ranks wrote in all sessions."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"a sample log is a folder, got {folder}, which is not a folder")
    kept: list[SampleLogEntry] = []
    reading = SampleLogReport()
    by_session: defaultdict[int, list[tuple[int, Path]]] = defaultdict(list)
    for number, rank, path in _files(folder):
        by_session[number].append((rank, path))
    for number in sorted(by_session):
        lines = {rank: _lines(path, reading.torn) for rank, path in sorted(by_session[number])}
        session = _agreed_header(number, lines, folder)
        if session is None:
            continue
        reading.sessions.append(session)
        if session.resumed:
            here = (session.cursor.epoch, session.cursor.committed)
            reading.undone.extend(entry for entry in kept if (entry.epoch, entry.start) >= here)
            kept = [entry for entry in kept if (entry.epoch, entry.start) < here]
        kept += [_entry(line, number) for found in lines.values() for line in found[1:]]
    reading.entries.extend(sorted(kept, key=lambda entry: (entry.epoch, entry.start, entry.rank)))
    return reading


def _files(folder: Path) -> list[tuple[int, int, Path]]:
    found = ((_NAME.fullmatch(path.name), path) for path in folder.glob("session-*.jsonl"))
    return sorted((int(match[1]), int(match[2]), path) for match, path in found if match)


def _lines(path: Path, torn: list[Path]) -> list[dict[str, Any]]:
    *whole, rest = path.read_bytes().split(b"\n")
    if rest:
        torn.append(path)
    try:
        return [read_json(_LINE, line, "a line of a sample log") for line in whole]
    except Malformed as error:
        raise SampleLogDamaged(f"{path}: {error}") from error


def _agreed_header(number: int, lines: dict[int, list[dict[str, Any]]], folder: Path) -> SampleLogSession | None:
    headers = [_session(number, found[0], folder) for found in lines.values() if found]
    if any(header != headers[0] for header in headers):
        raise SampleLogDamaged(f"{folder}: ranks began session {number} at different cursors or in different worlds")
    return headers[0] if headers else None


def _session(number: int, line: dict[str, Any], folder: Path) -> SampleLogSession:
    try:
        said = {name: value for name, value in line.items() if name not in ("session", "rank")}
        return typed(SampleLogSession, {**said, "number": number}, "the header of a session")
    except Malformed as error:
        raise SampleLogDamaged(f"{folder}: session {number}: {error}") from error


def _entry(line: dict[str, Any], session: int) -> SampleLogEntry:
    try:
        return typed(SampleLogEntry, {**line, "session": session}, "an entry of a sample log")
    except Malformed as error:
        raise SampleLogDamaged(f"session {session}: {error}") from error


def _begins_like(path: Path, header: SampleLogSession) -> bool:
    with path.open("rb") as file:
        line = file.readline()
    if not line.endswith(b"\n"):
        return False
    try:
        return _session(0, read_json(_LINE, line, "the header of a session"), path.parent) == header
    except Malformed as error:
        raise SampleLogDamaged(f"{path}: {error}") from error
