"""One save on one rank: copy its share of the state, compare it with the other ranks, and write it in a thread."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.checkpoint import snapshots
from paceline.checkpoint.checkpoint_errors import CheckpointError
from paceline.checkpoint.compare import check_copy, compare
from paceline.checkpoint.joint import ORPHAN_S, JointWrite
from paceline.checkpoint.manifest import Manifest, file_name
from paceline.checkpoint.ranks import OptionalGroup
from paceline.checkpoint.sharing import Deal
from paceline.checkpoint.snapshots import Snapshot
from paceline.checkpoint.state import TREE, HostCopy
from paceline.checkpoint.writer import Parts, write_part, write_snapshot


@dataclass(frozen=True)
class SavePlan:
    """What all ranks have agreed on, and this rank's part of the write."""

    directory: Path
    manifest: Manifest
    deal: Deal
    tree: bytes
    rank: int
    check_owned: Callable[[], None]  # raises if the directory is this process's no more

    @property
    def team(self) -> tuple[int, ...]:
        """The ranks that write to the directory of this one. Empty: it writes nothing."""
        return next((team for team in self.deal.teams if self.rank in team), ())

    @property
    def home(self) -> Path:
        """The temporary directory, by a name that all ranks know."""
        return self.directory / f".step-{self.manifest.step:08d}.new-{self.manifest.id:016x}"


class Save:
    """A save that is under way: copied while training waits, and written in the background."""

    def __init__(self, plan: SavePlan, copies: Mapping[str, HostCopy], group: OptionalGroup) -> None:
        """Copy this rank's share and compare the state. All ranks do so together."""
        # Without the tensors themselves, which this object would keep alive.
        self._plan = replace(plan, deal=plan.deal._replace(shares={}, compared=[], entries=[]))
        self._files = [
            name for name, share in plan.deal.shares.items() if share.tensors or plan.manifest.world_size == 1
        ]
        self._expected: list[tuple[str, str, str, int]] = []  # file, entry, name of the tensor, digest
        self._copies = copies
        self._joint = JointWrite(plan.home, plan.team, plan.rank) if len(plan.team) > 1 else None
        self._failed: Exception | None = None
        try:
            if self._joint is not None:
                self._joint.enter()
            for file, share in plan.deal.shares.items():
                copies[file].take(share.tensors, share.metadata)
        except (RuntimeError, MemoryError, OSError) as error:  # reported as a write that failed
            self._failed = error
        try:
            if plan.manifest.world_size > 1:
                note = "" if self._failed is None else f"{type(self._failed).__name__}: {self._failed}"
                digests, notes = compare(plan.manifest.step, plan.deal.compared, note, group)
                self._expect(plan.deal, digests)
                other = next((rank for rank in plan.team if notes[rank]), None)
                if self._failed is None and other is not None:  # then no rank of the team begins
                    self._failed = CheckpointError(f"rank {other} cannot write: {notes[other]}")
        except BaseException:
            self._give_up()
            raise

    def write(self) -> Snapshot | None:
        """Write this rank's share, coordinating with other ranks through files only. Returns the snapshot if this rank
        completes it."""
        plan, joint = self._plan, self._joint
        if self._failed is not None:
            self._give_up()
            raise self._failed
        files: dict[str, Parts] = {file_name(name, plan.rank): self._copies[name].parts() for name in self._files}
        if joint is not None and not joint.leads:
            write_part(files, self._check, joint)
            return None
        files[file_name(TREE, plan.rank)] = [plan.tree]
        with suppress(OSError):  # first, because it may free space; tidying tries again, and reports errors
            snapshots.remove_abandoned(plan.directory)
        manifest = replace(plan.manifest, ranks=plan.team)
        return write_snapshot(plan.directory, manifest, files, check=self._check_all, joint=joint)

    def hurry(self) -> None:
        """Some of the ranks that write may be out of reach: do not wait for them for long."""
        if self._joint is not None:
            self._joint.patience_s = ORPHAN_S

    def _check_all(self) -> None:
        # By now there is a temporary directory, which whoever takes over removes: either that one or this one is late.
        self._plan.check_owned()
        self._check()

    def _expect(self, deal: Deal, digests: Sequence[int | None]) -> None:
        for digest, entry, piece in zip(digests, deal.entries, deal.compared, strict=True):
            if entry is not None and digest is not None:
                self._expected.append((*entry, piece.name, digest))

    def _check(self) -> None:
        """Raise CheckpointError if what was written differs from what the ranks compared."""
        for file, entry, name, digest in self._expected:
            check_copy(name, self._copies[file].taken()[entry], digest)

    def _give_up(self) -> None:
        if self._joint is not None:
            self._joint.close()
            if self._joint.leads:
                with suppress(OSError):  # the first error is the one to report; the next save removes what is left
                    shutil.rmtree(self._joint.home)
