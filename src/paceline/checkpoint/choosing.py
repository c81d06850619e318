"""The choice of the snapshot that all ranks load, and what they need of it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from paceline.checkpoint import snapshots
from paceline.checkpoint.checkpoint_errors import Damaged, Skipped
from paceline.checkpoint.manifest import NAME
from paceline.checkpoint.open_snapshot import Chunk, OpenSnapshot
from paceline.checkpoint.ranks import Look, OptionalGroup, newest_on_all
from paceline.checkpoint.reader import Restored, Targets, lacking
from paceline.checkpoint.retention import Keep
from paceline.checkpoint.snapshots import Snapshot

# "latest", "compared" or "best", a step, or the path of a snapshot or of a directory of them: see `Checkpointer.load`.
Which = str | os.PathLike[str] | int


class Choice(NamedTuple):
    """The snapshot that all ranks load, if there is one, its directory, and the snapshots that were skipped."""

    snapshot: Snapshot | None
    directory: Path
    skipped: tuple[Skipped, ...]


def choose(which: Which, directory: Path, look: Look, group: OptionalGroup, keep: Keep) -> Choice:
    """The newest snapshot that matches `which` and is intact on all ranks.

    All ranks call it, with a `which` of the same kind.
    """
    directory, found, broken = _candidates(which, directory)
    if which == "best":
        found = keep.best_of(found)
    if which == "compared":
        compared = [one for one in found if one.manifest.compared]
        chosen, skipped = newest_on_all(compared, broken, look, group)
        if chosen is not None:
            return Choice(chosen, directory, skipped)
    chosen, skipped = newest_on_all(found, broken, look, group)
    return Choice(chosen, directory, skipped)


def _candidates(which: Which, directory: Path) -> tuple[Path, list[Snapshot], list[Damaged]]:
    """The directory that `which` means on this rank, its snapshots, newest first, and those with damaged manifests."""
    if not isinstance(which, int) and which not in ("latest", "compared", "best"):
        path = Path(which)
        if snapshots.NAME.match(path.name) or (path.is_dir() and any(NAME.match(one.name) for one in path.iterdir())):
            try:
                return path.parent, [snapshots.read(path)], []
            except Damaged as error:
                return path.parent, [], [error]
        directory = path
    try:
        found, broken = snapshots.survey(directory)
    except OSError as error:
        return directory, [], [Damaged(directory, f"it cannot be listed: {error.strerror}")]
    if isinstance(which, int):
        found = [one for one in found if one.step == which]
        broken = [one for one in broken if snapshots.step_of(one.path) == which]
    return directory, found, broken


class Reading:
    """A snapshot that is about to be read: what is needed of it and, if known, why it cannot be loaded here.
    Raises Damaged when it is made, if files are missing."""

    def __init__(self, snapshot: Snapshot, targets: Targets | None, rank: int, size: int) -> None:
        """Without `targets` everything in the snapshot is needed."""
        self.problem = ""
        self.restored: Restored | None = None
        self._opened = OpenSnapshot(snapshot)
        self.needed: list[Chunk] = self._opened.chunks()
        if targets is None:
            return
        try:
            self.restored = Restored(self._opened, rank, size)
        except Damaged as error:
            self.problem = error.why
            return
        wanted = list(self.restored.wanted(targets))
        for stored, begin, end in wanted:
            if (hole := stored.missing(begin, end)) is not None:
                self.problem = lacking(snapshot, stored, hole)
                return
        control = [chunk for name in self.restored.trees for chunk in self._opened.chunks() if chunk[0] == name]
        headers = [(name, 0) for name in snapshot.manifest.files]
        self.needed = [
            *control,
            *headers,
            *(chunk for stored, begin, end in wanted for chunk in stored.chunks(begin, end)),
        ]

    def verify(self, chunks: Sequence[Chunk], threads: int) -> None:
        self._opened.verify(chunks, threads)
