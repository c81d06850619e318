"""Which snapshots of a directory are kept: the newest, milestones, and the best so far."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.snapshots import Snapshot, has_all_files, remove, step_of, survey
from paceline.errors import UsageError


@dataclass(frozen=True)
class Keep:
    """The `newest` of different steps; the first snapshot of every `every` steps, from the first multiple on; and the
    one with the `best` metric, "min" or "max"."""

    newest: int = 2
    every: int | None = None
    best: str = "min"

    def __post_init__(self) -> None:
        if type(self.newest) is not int or self.newest < 2:
            raise UsageError(
                f"keep must be a whole number of at least 2, because the newest may be damaged; got {self.newest!r}"
            )
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise UsageError(f"keep_every must be a whole number of at least 1, or None, got {self.every!r}")
        if self.best not in ("min", "max"):
            raise UsageError(f"best must be 'min' or 'max', got {self.best!r}")

    def milestones(self, found: Iterable[Snapshot]) -> list[Snapshot]:
        """The snapshots that are kept permanently."""
        if self.every is None:
            return []
        first: dict[int, Snapshot] = {}
        for one in sorted(found, key=lambda one: one.step):
            if one.step >= self.every:
                first.setdefault(one.step // self.every, one)
        return list(first.values())

    def best_of(self, found: Iterable[Snapshot]) -> list[Snapshot]:
        """The snapshot with the best metric, the newest of several; none if none has a metric."""
        known = [(one.manifest.metric, one) for one in found if one.manifest.metric is not None]
        sign = 1 if self.best == "max" else -1
        return [max(known, key=lambda pair: (sign * pair[0], pair[1].key))[1]] if known else []


def remove_older(directory: Path, keep: Keep, refused: Sequence[Path]) -> list[Path]:
    """Remove all that are older than the newest intact snapshots and not kept for another reason. Returns what was
    removed.

    `refused` are known to be damaged and do not count as intact.
    """
    found, broken = survey(directory)
    good = [one for one in found if one.path not in refused and has_all_files(one)]
    by_step: dict[int, Snapshot] = {}
    for snapshot in good:
        by_step.setdefault(snapshot.step, snapshot)
    newest = list(by_step.values())[: keep.newest]
    kept = [*newest, *keep.milestones(by_step.values()), *keep.best_of(by_step.values())]
    steps, paths = {one.step for one in kept}, {one.path for one in kept}
    copies = [one.path for one in good if one.step in steps and one.path not in paths]
    older: list[Path] = []
    if len(newest) == keep.newest:  # otherwise damaged ones may still be useful
        oldest = min(one.manifest.number for one in newest)
        older = [one.path for one in found if one.manifest.number < oldest and one.path not in {*paths, *copies}]
        older += [error.path for error in broken if step_of(error.path) < min(one.step for one in newest)]
    gone = copies + older
    for path in gone:
        remove(path)
    return gone
