"""`Checkpointer`: saves and loads snapshots, with all ranks in agreement about them."""

import json
import logging
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from paceline.checkpoint import snapshots
from paceline.checkpoint.checkpoint_errors import NoCheckpoint, NotSaved, Skipped
from paceline.checkpoint.choosing import Choice, Reading, Which, choose
from paceline.checkpoint.manifest import Manifest, versions
from paceline.checkpoint.outcome import CheckpointEvent, Loaded, Saved
from paceline.checkpoint.preemption import Cadence
from paceline.checkpoint.ranks import Look, OptionalGroup, gather, raising_together, rank_and_size, text_hash
from paceline.checkpoint.reader import Restored, Targets
from paceline.checkpoint.retention import Keep, remove_older
from paceline.checkpoint.run_directory import RunDirectory
from paceline.checkpoint.saving import Save, SavePlan
from paceline.checkpoint.sharing import deal, describe
from paceline.checkpoint.snapshots import Snapshot
from paceline.checkpoint.state import MODEL, STATE, HostCopy, TrainingState, capture, different_models
from paceline.checkpoint.writer import BackgroundWrite
from paceline.collectives.checked import named_barrier
from paceline.errors import UsageError
from paceline.in_use import uses
from paceline.progress import Phase, own_progress

logger = logging.getLogger("paceline")


class Checkpointer:
    """Keeps the newest `keep` snapshots of a run in `directory`.

        checkpointer = Checkpointer("runs/1/checkpoints", every_steps=50)
        if checkpointer.latest() is not None:
            step = checkpointer.load(model=model, optimizer=optimizer, loader=loader).step
        ...
        if checkpointer.due(step):
            checkpointer.save(step, model=model, optimizer=optimizer, loader=loader)
        ...
        checkpointer.wait()

    All ranks must call every method but `close`. Each rank writes a share: its shards under a sharded placement, and
    a stripe of what all ranks hold. No rank gathers the whole state. Hosts that do not share a directory each write
    what their ranks hold to their own; if a rank needs more than its directory holds, the error says which files to
    copy there. A snapshot is written to a temporary directory, with a SHA-256 of every 4 MiB, and is renamed once all
    of it is on disk; older ones are removed after that. A save that fails is reported on all ranks by their next call,
    and training can continue. Every rank keeps host memory for a copy of its share.

    `keep_every=1000` also keeps milestones: the first snapshot of every 1,000 steps, from step 1,000 on. If saves
    are given a `metric`, the best so far is kept too: the one with the lowest, or with `best="max"` the highest.

    The writing process holds a lock on the directory until it ends: a save by another run raises UsageError on
    all ranks of that run. Loading needs no lock.

    `busy` says what a save does while the previous one is still being written: "wait" or "skip". `timeout` is how many
    seconds a rank waits for others to make the same call before it raises PeerAbsent; ranks that wait in another
    collective are found within seconds, even without it.

    Before anything is written, ranks compare the bits of their parameters and optimizer states (in lanes also of their
    buffers), and the copy that is written is checked against them. If ranks differ, `save` raises ReplicaDrift on all
    of them and saves nothing, so that no checkpoint holds drifted state. `compare=False` is for ranks that are meant to
    differ: then the lowest rank that sees a directory writes its own copy of everything that is not in shards.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 2,
        keep_every: int | None = None,
        best: Literal["min", "max"] = "min",
        asynchronous: bool = True,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        busy: Literal["wait", "skip"] = "wait",
        on_event: Callable[[CheckpointEvent], None] | None = None,
        group: OptionalGroup = None,
        timeout: float | None = None,
        compare: bool = True,
    ) -> None:
        self._keep = Keep(keep, keep_every, best)
        if every_steps is not None and (type(every_steps) is not int or every_steps < 1):
            raise UsageError(f"every_steps must be a whole number of at least 1, or None, got {every_steps!r}")
        if every_seconds is not None and not every_seconds > 0:
            raise UsageError(f"every_seconds must be a number above 0, or None, got {every_seconds!r}")
        if busy not in ("wait", "skip"):
            raise UsageError(f"busy must be 'wait' or 'skip', got {busy!r}")
        if timeout is not None and not timeout > 0:
            raise UsageError(f"timeout must be a number of seconds above 0, or None, got {timeout!r}")
        self.directory = Path(directory)
        self._asynchronous = asynchronous
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._busy = busy
        self._on_event = on_event
        self._group = group
        self._timeout = timeout
        self._compare = compare
        # Ten times per interval between saves, so that a save is at most a tenth of the interval late.
        self._cadence = Cadence((every_seconds or 0.0) / 10, group)
        self._saved_at = time.monotonic()
        self._writing: BackgroundWrite | None = None
        self._orphan: BackgroundWrite | None = None  # of an earlier world: some rank may not have written its part
        self._save: Save | None = None  # the newest
        self._copies = {MODEL: HostCopy(), STATE: HostCopy()}
        self._refused: list[Path] = []
        self._place = RunDirectory(self.directory)

    def due(self, step: int) -> bool:
        """Whether to save after `step`. All ranks call it in every step; the clock of rank 0 decides for all."""
        uses.tell(self)
        if self._every_steps is not None and step > 0 and step % self._every_steps == 0:
            return True
        if self._every_seconds is None:
            return False
        leads = rank_and_size(self._group)[0] == 0
        return bool(self._cadence.ask(leads and time.monotonic() - self._saved_at >= self._every_seconds))

    def save(
        self,
        step: int,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        metric: float | None = None,
        **more: Any,
    ) -> Saved:
        """Save the state after `step`. Returns when this rank's share is copied to host memory; a thread writes it.

        `metric` is the quality of this state; rank 0's value is used. `more` takes anything that has a state_dict(),
        plain values, tensors, and lists and dicts of them; those of the lowest rank that sees the directory are saved.
        What differs between ranks is passed as `PerRank(value)`.
        """
        if type(step) is not int or step < 0:
            raise UsageError(f"step must be a whole number of at least 0, got {step!r}")
        started = time.perf_counter()
        with self._together(f"Checkpointer.save({step})"):
            state = capture(model, optimizer, more, self._group)
            skip = self._busy == "skip" and self._writing is not None and not self._writing.done
            waiting = time.perf_counter()
            if not skip:
                self.close()
            waited_s = time.perf_counter() - waiting
            self._saved_at = time.monotonic()
            plan, problem = self._agree(step, state, skip, metric)
            skip = plan is None
            if plan is None:
                self._emit("skipped", step, f"step {step} is not saved: the previous checkpoint is still being written")
            else:
                self._start(plan)
            if not skip and not self._asynchronous:
                problem = self._settle() or problem
        return Saved(step, time.perf_counter() - started, waited_s, skip, problem)

    def wait(self) -> None:
        """Return when the last save is on disk. Raises NotSaved, on all ranks, if it could not be written."""
        with self._together("Checkpointer.wait()"):
            problem = self._settle()
        if problem is not None:
            raise problem

    def close(self) -> None:
        """Wait for this rank's writer only. The next other call reports to all ranks how the write ended."""
        if self._writing is not None:
            self._writing.join()

    def follow_group(self) -> None:
        """The world has changed: forget what was known of its ranks. All ranks call it. If a write that is under way
        lacks the part of a rank that has left, an event reports it, and it is no error in the new world."""
        self._orphan = self._writing
        if self._save is not None:
            self._save.hurry()
        self._cadence.follow_group()
        self._place.follow_group()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._place.release()

    def latest(self) -> Snapshot | None:
        """The newest snapshot that is intact on all ranks, with every byte verified, or None."""
        with self._together("Checkpointer.latest()"):
            self.close()
            return self._choose("latest", lambda one: Reading(one, None, 0, 1)).snapshot

    def load(
        self,
        snapshot: Which | Snapshot = "latest",
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **more: Any,
    ) -> Loaded:
        """Load a snapshot into `model`, `optimizer`, and whatever of `more` has load_state_dict().

        `snapshot` is "latest" (the newest that is intact on all ranks), "compared" (the newest of those that ranks
        compared when they saved it; if there is none, the newest of all), "best" (of those with a metric), a step,
        or the path of a snapshot or of a directory of them. Every byte that a rank will read is verified before
        anything is changed, by one of the ranks that see it; then the existing tensors are overwritten. Raises
        NoCheckpoint if none is intact on all ranks, and CheckpointMismatch if it was made from another model;
        both on all ranks. A replica in lanes logs a warning when the number of lanes, or a setting that chooses
        kernels, has changed.
        """
        with self._together("Checkpointer.load()", Phase.LOAD):
            self.close()
            targets = Targets(model, optimizer, more)
            restored, skipped = self._read(snapshot, targets)
            with raising_together(self._group):
                restored.check(targets)
            with raising_together(self._group):
                restored.put(targets)
        found = restored.snapshot
        if (unlike := restored.other_bits(model, more)) and rank_and_size(self._group)[0] == 0:
            logger.warning(
                "step %d in %s was saved under other conditions, so this run may not repeat its bits; then and now: %s",
                found.step,
                found.path,
                "; ".join(unlike),
            )
        return Loaded(found.step, found.path, found.manifest.world_size, restored.more, skipped)

    @contextmanager
    def _together(self, call: str, phase: Phase = Phase.CHECKPOINT) -> Iterator[None]:
        """Check that all ranks are in the same call, and tell the launcher that a checkpoint may take long."""
        uses.tell(self)
        with own_progress().during(phase):
            named_barrier(call, group=self._group, timeout=self._timeout)
            yield

    def _emit(self, kind: str, step: int, text: str, path: object = "", seconds: float = 0.0) -> None:
        if self._on_event is not None:
            self._on_event(CheckpointEvent(kind, step, text, str(path), seconds))

    def _agree(
        self, step: int, state: TrainingState, skip: bool, metric: float | None
    ) -> tuple[SavePlan | None, NotSaved | None]:
        """The new save, unless it is skipped, and what went wrong with the previous one."""
        rank, size = rank_and_size(self._group)
        homes = self._place.homes(self._group)
        holder = self._place.own() if homes[rank] == rank else ""
        model = text_hash(json.dumps(state.shapes, sort_keys=True))
        own = (model, self._place.next_number(), secrets.randbits(60), skip, holder, self._report(), describe(state))
        rows = gather((*own, metric if metric is None else float(metric)), self._group)
        models, numbers, ids, skips, holders, reports, described, metrics = zip(*rows, strict=True)
        if any(holders):
            self._place.refuse_second(holders)
        if len(set(models)) > 1:
            raise different_models(gather(state.shapes, self._group))
        self._place.number = max(numbers)
        problem = self._problem(reports)
        if any(skips):
            return None, problem
        manifest = Manifest(
            step=step,
            number=self._place.number,
            id=ids[0],
            world_size=size,
            files={},
            model=state.shapes,
            versions=versions(),
            compared=size if self._compare else 0,
            metric=None if metrics[0] is None or not math.isfinite(metrics[0]) else metrics[0],
        )
        dealt = deal(state, described, homes, rank, compared=self._compare)
        return SavePlan(self.directory, manifest, dealt, state.tree, rank, self._place.check_owned), problem

    def _settle(self) -> NotSaved | None:
        self.close()
        return self._problem(gather(self._report(), self._group))

    def _report(self) -> tuple[int, str] | None:
        """How this rank's finished write failed: its step and the reason, for all ranks. None if it has not failed."""
        write = self._writing
        if write is None or not write.done:
            return None
        self._writing = None
        if write.error is None:
            if write.snapshot is None:
                return None  # another rank completes it
            text = f"step {write.step} is saved ({write.seconds:.2f} s in the background)"
            self._emit("saved", write.step, text, write.snapshot.path, write.seconds)
            if write.untidy is not None:
                self._emit("left", write.step, f"older checkpoints could not be removed: {write.untidy}")
            for path in write.removed:
                self._emit("removed", snapshots.step_of(path), f"{path.name} is removed", path)
            return None
        text = (
            f"the checkpoint of step {write.step} could not be written to {self.directory} "
            f"({type(write.error).__name__}: {write.error}); remaining checkpoints: {self._place.remaining()}"
        )
        if write is self._orphan:
            self._emit("failed", write.step, text)
            return None
        return write.step, text

    def _problem(self, reports: Sequence[tuple[int, str] | None]) -> NotSaved | None:
        """The error of the first rank that reports one: the same on all ranks."""
        for rank, report in enumerate(reports):
            if report is not None:
                step, text = report
                self._emit("failed", step, text)
                return NotSaved(f"rank {rank}: {text}", step=step, rank=rank)
        return None

    def _start(self, plan: SavePlan) -> None:
        """Copy this rank's share, compare it, and start writing it. All ranks call it."""
        save = Save(plan, self._copies, self._group)
        if plan.team:
            self._save = save
            self._writing = BackgroundWrite(plan.manifest.step, save.write, self._tidy, asynchronous=self._asynchronous)

    def _tidy(self, written: Snapshot) -> list[Path]:
        self._refused = [path for path in self._refused if path != written.path]
        snapshots.remove_abandoned(self.directory)
        return remove_older(self.directory, self._keep, self._refused)

    def _choose(self, which: Which, look: Look) -> Choice:
        """Choose what all ranks load. Skipped snapshots are reported once, and do not count as ones to keep."""
        choice = choose(which, self.directory, look, self._group, self._keep)
        refused = [(choice.directory / one.path, str(one)) for one in choice.skipped]
        for path, text in [(path, text) for path, text in refused if path not in self._refused]:
            self._refused.append(path)
            self._emit("refused", snapshots.step_of(path), text, path)
            if self._on_event is None and rank_and_size(self._group)[0] == 0:
                logger.warning("a checkpoint in %s is passed over: %s", choice.directory, text)
        return choice

    def _read(self, which: Which | Snapshot, targets: Targets) -> tuple[Restored, tuple[Skipped, ...]]:
        if isinstance(which, Snapshot):
            which = which.path
        reading: list[Reading] = []

        def look(snapshot: Snapshot) -> Reading:
            reading[:] = [Reading(snapshot, targets, *rank_and_size(self._group))]
            return reading[0]

        choice = self._choose(which, look)
        if choice.snapshot is None:
            if isinstance(which, int):
                where = f"of step {which} in {self.directory}"
            else:
                where = f"in {self.directory}" if which in ("latest", "compared", "best") else f"at {which}"
            why = "; ".join(map(str, choice.skipped))
            raise NoCheckpoint(
                f"there is no checkpoint {where} that is intact on all ranks" + (f": {why}" if why else ""),
                skipped=choice.skipped,
            )
        restored = reading[0].restored
        assert restored is not None
        return restored, choice.skipped
