"""`Checkpointer`: saves and loads snapshots, with all ranks in agreement about them."""

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from paceline.checkpoint import snapshots
from paceline.checkpoint.compare import Digests, check_copy, compare
from paceline.checkpoint.errors import CheckpointMismatch, NoCheckpoint, NotSaved, Skipped
from paceline.checkpoint.manifest import Manifest, versions
from paceline.checkpoint.open_snapshot import OpenSnapshot
from paceline.checkpoint.preemption import Cadence
from paceline.checkpoint.ranks import OptionalGroup, Verify, gather, is_writer, rank_and_size, text_hash
from paceline.checkpoint.reader import Choice, Restored, Which, choose
from paceline.checkpoint.snapshots import Snapshot
from paceline.checkpoint.state import MODEL, STATE, TREE, HostCopy, TrainingState, capture, different_models
from paceline.checkpoint.writer import BackgroundWrite, Parts, write_snapshot
from paceline.collectives.checked import named_barrier
from paceline.errors import UsageError
from paceline.progress import Phase, own_progress
from paceline.stored.directory import DirectoryLock, make_directory

logger = logging.getLogger("paceline")


@dataclass(frozen=True)
class CheckpointEvent:
    """Something the user should know: `kind` is "saved", "failed", "skipped", "refused", "removed" or "left"
    (an old snapshot that could not be removed)."""

    kind: str
    step: int
    text: str
    path: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Saved:
    """The outcome of a call of `save`, as far as it is known.

    `blocked_s` is how long the call blocked this rank, of which `waited_s` for the previous write. `skipped` says that
    the previous write was still under way, so nothing was saved. `problem` is what is known to have gone wrong: with
    the previous save, or with this one if it was not asynchronous.
    """

    step: int
    blocked_s: float
    waited_s: float = 0.0
    skipped: bool = False
    problem: NotSaved | None = None


@dataclass(frozen=True)
class Loaded:
    """What was loaded. `skipped` are the snapshots that were passed over.

    `more` holds all else that was saved: tensors on the CPU, and for what was `PerRank` a list of all ranks' values.
    """

    step: int
    path: Path
    world_size: int
    more: dict[str, Any]
    skipped: tuple[Skipped, ...] = ()


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

    All methods but `close` are called by all ranks. Replicas are equal, so rank 0 writes, and one rank of each host
    that does not see rank 0's directory. A snapshot is written to a temporary directory, with a SHA-256 of every
    file, and gets its name when all of it is on disk; older ones are removed after that. A save that fails is reported
    on all ranks by their next call, and training can continue. The writer keeps host memory for a copy of the state.

    The process that writes owns the directory, by a lock that ends with it: a save by another run raises UsageError on
    all ranks of that run. Loading needs no lock.

    `busy` says what a save does while the previous one is still being written: "wait" or "skip". `timeout` is how long
    a rank waits for others to come to the same call, before it raises PeerAbsent; ranks that wait in another collective
    are found within seconds, even without it.

    Before anything is written, ranks compare the bits of their parameters and optimizer states (in lanes also of their
    buffers), and what is written is compared with those. If ranks differ, `save` raises ReplicaDrift on all of them and
    saves nothing, so that no checkpoint holds what has drifted. `compare=False` is for ranks that are meant to differ.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 2,
        asynchronous: bool = True,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        busy: Literal["wait", "skip"] = "wait",
        on_event: Callable[[CheckpointEvent], None] | None = None,
        group: OptionalGroup = None,
        timeout: float | None = None,
        compare: bool = True,
    ) -> None:
        if type(keep) is not int or keep < 2:
            raise UsageError(
                f"keep must be a whole number of at least 2, because the newest may be damaged; got {keep!r}"
            )
        if every_steps is not None and (type(every_steps) is not int or every_steps < 1):
            raise UsageError(f"every_steps must be a whole number of at least 1, or None, got {every_steps!r}")
        if every_seconds is not None and not every_seconds > 0:
            raise UsageError(f"every_seconds must be a number above 0, or None, got {every_seconds!r}")
        if busy not in ("wait", "skip"):
            raise UsageError(f"busy must be 'wait' or 'skip', got {busy!r}")
        if timeout is not None and not timeout > 0:
            raise UsageError(f"timeout must be a number of seconds above 0, or None, got {timeout!r}")
        self.directory = Path(directory)
        self._keep = keep
        self._asynchronous = asynchronous
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._busy = busy
        self._on_event = on_event
        self._group = group
        self._timeout = timeout
        self._compare = compare
        # Ten times as often as a save is due, so that it is at most a tenth late.
        self._cadence = Cadence((every_seconds or 0.0) / 10, group)
        self._saved_at = time.monotonic()
        self._writing: BackgroundWrite | None = None
        self._copies = {MODEL: HostCopy(), STATE: HostCopy()}
        self._number = -1
        self._is_writer: bool | None = None
        self._refused: list[Path] = []
        self._lock = DirectoryLock(self.directory)

    def due(self, step: int) -> bool:
        """Whether to save after `step`. All ranks call it in every step; the clock of rank 0 decides for all."""
        if self._every_steps is not None and step > 0 and step % self._every_steps == 0:
            return True
        if self._every_seconds is None:
            return False
        leads = rank_and_size(self._group)[0] == 0
        return bool(self._cadence.ask(leads and time.monotonic() - self._saved_at >= self._every_seconds))

    def save(
        self, step: int, *, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **more: Any
    ) -> Saved:
        """Save the state after `step`. Returns when it is copied to host memory; a thread writes it.

        `more` takes anything that has a state_dict(), plain values, tensors, and lists and dicts of them; the writer's
        are saved. What differs between ranks goes in as `PerRank(value)`.
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
            writes = self._writes()
            manifest, skip, problem = self._agree(step, state, skip, self._own() if writes else "")
            if skip:
                self._emit("skipped", step, f"step {step} is not saved: the previous checkpoint is still being written")
            else:
                self._start(manifest, state, writes=writes)
            if not skip and not self._asynchronous:
                problem = self._settle() or problem
        return Saved(step, time.perf_counter() - started, waited_s, skip, problem)

    def wait(self) -> None:
        """Return when what was saved is on disk. Raises NotSaved, on all ranks, if it could not be written."""
        with self._together("Checkpointer.wait()"):
            problem = self._settle()
        if problem is not None:
            raise problem

    def close(self) -> None:
        """Wait for this rank's writer only. The next other call tells all ranks how the write ended."""
        if self._writing is not None:
            self._writing.join()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._lock.release()

    def latest(self) -> Snapshot | None:
        """The newest snapshot that is whole on all ranks, every byte compared, or None."""
        with self._together("Checkpointer.latest()"):
            self.close()
            return self._choose("latest", lambda one, part, parts: OpenSnapshot(one).verify(part, parts)).snapshot

    def load(
        self,
        snapshot: Which | Snapshot = "latest",
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **more: Any,
    ) -> Loaded:
        """Put a snapshot back into `model`, `optimizer`, and whatever of `more` has load_state_dict().

        `snapshot` is "latest" (the newest that is whole on all ranks), "compared" (the newest of those that ranks
        have compared when they saved it; if there is none, the newest of all), a step, or the path of a snapshot or
        of a directory of them. Every byte is compared before anything is changed, by one of the ranks that see it; then
        tensors are read into the memory of those that are there. Raises NoCheckpoint if there is none that is whole on
        all ranks, and CheckpointMismatch if it is not of this model; both on all ranks. A replica in lanes logs a
        warning when the number of lanes, or what chooses kernels, is not what it was.
        """
        with self._together("Checkpointer.load()"):
            self.close()
            restored, skipped = self._read(snapshot)
            with self._raising_together():
                restored.check(model, optimizer, more)
            with self._raising_together():
                restored.put(model, optimizer, more)
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
    def _together(self, call: str) -> Iterator[None]:
        """Inside, all ranks are in the same call, and the launcher knows that a checkpoint may take long."""
        with own_progress().during(Phase.CHECKPOINT):
            named_barrier(call, group=self._group, timeout=self._timeout)
            yield

    def _emit(self, kind: str, step: int, text: str, path: object = "", seconds: float = 0.0) -> None:
        if self._on_event is not None:
            self._on_event(CheckpointEvent(kind, step, text, str(path), seconds))

    def _own(self) -> str:
        """Keep other runs from saving to the directory. Returns who does so already, or nothing."""
        try:
            make_directory(self.directory)
            return self._lock.acquire()
        except OSError:  # the write will fail for the same reason, and report it
            return ""

    def _agree(
        self, step: int, state: TrainingState, skip: bool, holder: str
    ) -> tuple[Manifest, bool, NotSaved | None]:
        """The manifest of the new snapshot, whether it is skipped, and what went wrong with the previous one."""
        model = text_hash(json.dumps(state.shapes, sort_keys=True))
        own = (model, self._next_number(), secrets.randbits(60), skip, holder, self._report())
        rows = gather(own, self._group)
        models, numbers, ids, skips, holders, reports = zip(*rows, strict=True)
        if any(holders):
            self._refuse_second(holders)
        if len(set(models)) > 1:
            raise different_models(gather(state.shapes, self._group))
        self._number = max(numbers)
        manifest = Manifest(
            step=step,
            number=self._number,
            id=ids[0],
            world_size=len(rows),
            files={},
            model=state.shapes,
            versions=versions(),
            compared=len(rows) if self._compare else 0,
        )
        return manifest, any(skips), self._problem(reports)

    def _refuse_second(self, holders: Sequence[str]) -> NoReturn:
        rank, holder = next((rank, text) for rank, text in enumerate(holders) if text)
        raise UsageError(
            f"rank {rank} cannot save to {self.directory}: {holder} saves there, and two runs in one directory would "
            f"remove each other's checkpoints; give this run a directory of its own, or end the other one"
        )

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
            assert write.snapshot is not None
            text = f"step {write.step} is saved ({write.seconds:.2f} s in the background)"
            self._emit("saved", write.step, text, write.snapshot.path, write.seconds)
            if write.untidy is not None:
                self._emit("left", write.step, f"older checkpoints could not be removed: {write.untidy}")
            for path in write.removed:
                self._emit("removed", snapshots.step_of(path), f"{path.name} is removed", path)
            return None
        kept = snapshots.listed(self.directory) if os.access(self.directory, os.R_OK | os.X_OK) else []
        text = (
            f"the checkpoint of step {write.step} could not be written to {self.directory} "
            f"({type(write.error).__name__}: {write.error}); remaining checkpoints: "
            f"{', '.join(path.name for path in kept) or 'none'}"
        )
        return write.step, text

    def _problem(self, reports: Sequence[tuple[int, str] | None]) -> NotSaved | None:
        """The error of the first rank that reports one: the same on all ranks."""
        for rank, report in enumerate(reports):
            if report is not None:
                step, text = report
                self._emit("failed", step, text)
                return NotSaved(f"rank {rank}: {text}", step=step, rank=rank)
        return None

    def _next_number(self) -> int:
        if self._number < 0:
            try:
                found, _ = snapshots.survey(self.directory)
            except OSError:  # the write will fail for the same reason, and report it
                found = []
            self._number = max((one.manifest.number for one in found), default=0)
        return self._number + 1

    def _writes(self) -> bool:
        if self._is_writer is None:
            self._is_writer = is_writer(self.directory, self._group)
        return rank_and_size(self._group)[0] == 0 if self._is_writer is None else self._is_writer

    def _start(self, manifest: Manifest, state: TrainingState, *, writes: bool) -> None:
        """Copy the state, compare it with that of the others, and have it written. All ranks call it."""
        failed: Exception | None = None
        if writes:
            try:
                for name, tensors in state.files.items():
                    self._copies[name].take(tensors)
            except (RuntimeError, MemoryError) as error:  # no memory for the copy: reported as a write that failed
                failed = error
        digests: list[Digests] = []
        if self._compare and manifest.world_size > 1:
            digests = compare(manifest.step, state.replicated(state.files), self._group)
        if not writes:
            return

        def write() -> Snapshot:
            if failed is not None:
                raise failed
            with suppress(OSError):  # first of all, because it may make room; `tidy` tries again, and reports
                snapshots.remove_abandoned(self.directory)
            files: dict[str, Parts] = {name: copy.parts() for name, copy in self._copies.items()}
            files[TREE] = [state.tree]
            written = write_snapshot(self.directory, manifest, files, check=check)
            self._refused = [path for path in self._refused if path != written.path]
            return written

        def check() -> None:
            if digests:
                check_copy(state.replicated({name: copy.taken() for name, copy in self._copies.items()}), digests)

        def tidy() -> list[Path]:
            snapshots.remove_abandoned(self.directory)
            return snapshots.remove_older(self.directory, self._keep, self._refused)

        self._writing = BackgroundWrite(manifest.step, write, tidy, asynchronous=self._asynchronous)

    def _choose(self, which: Which, verify: Verify) -> Choice:
        """What all ranks load. Snapshots that were passed over are told once, and do not count as ones to keep."""
        choice = choose(which, self.directory, verify, self._group)
        refused = [(choice.directory / one.path, str(one)) for one in choice.skipped]
        for path, text in [(path, text) for path, text in refused if path not in self._refused]:
            self._refused.append(path)
            self._emit("refused", snapshots.step_of(path), text, path)
        return choice

    def _read(self, which: Which | Snapshot) -> tuple[Restored, tuple[Skipped, ...]]:
        if isinstance(which, Snapshot):
            which = which.path
        read: list[Restored] = []

        def verify(snapshot: Snapshot, part: int, parts: int) -> None:
            opened = OpenSnapshot(snapshot)
            opened.verify(part, parts)
            read[:] = [Restored(opened, *rank_and_size(self._group))]

        choice = self._choose(which, verify)
        if choice.snapshot is None:
            if isinstance(which, int):
                where = f"of step {which} in {self.directory}"
            else:
                where = f"in {self.directory}" if which in ("latest", "compared") else f"at {which}"
            why = "; ".join(map(str, choice.skipped))
            raise NoCheckpoint(
                f"there is no checkpoint {where} that is whole on all ranks" + (f": {why}" if why else ""),
                skipped=choice.skipped,
            )
        return read[0], choice.skipped

    @contextmanager
    def _raising_together(self) -> Iterator[None]:
        """Raise on all ranks if there is a problem on any."""
        problem: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below, when the others know
            problem = error
        for rank, text in enumerate(gather(problem and str(problem), self._group)):
            if text:
                raise problem or CheckpointMismatch(f"rank {rank}: {text}")
