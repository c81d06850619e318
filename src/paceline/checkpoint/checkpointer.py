"""`Checkpointer`: saves and loads generations, with all ranks of one mind about them."""

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar

import torch
from torch import nn

from paceline.checkpoint import generations
from paceline.checkpoint.agree import Cadence, Group, gather, gather_text, here, newest_on_all, number_of
from paceline.checkpoint.arrive import arrive
from paceline.checkpoint.compare import Words, check_copy, compare
from paceline.checkpoint.faults import CheckpointMismatch, Damaged, NoCheckpoint, NotSaved, Skipped
from paceline.checkpoint.generations import NAME, Generation
from paceline.checkpoint.manifest import FILE, Manifest, versions
from paceline.checkpoint.restore import Restored
from paceline.checkpoint.shapes import as_text, different_models
from paceline.checkpoint.sight import is_writer
from paceline.checkpoint.snapshot import MODEL, STATE, TREE, Snapshot, Staging, describe
from paceline.checkpoint.write import Parts, ignore, write_generation
from paceline.checkpoint.writing import Writing
from paceline.errors import UsageError
from paceline.progress import Phase, own_progress
from paceline.stored.directory import DirectoryLock, make_directory

logger = logging.getLogger("paceline")

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Event:
    """Something to tell the user: `kind` is "saved", "failed", "skipped", "refused", "removed" or "left"
    (an old generation that could not be removed)."""

    kind: str
    step: int
    text: str
    path: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Saved:
    """What became of a call of `save`, so far.

    `blocked_s` is how long the call held this rank, of which `waited_s` for the write before. `skipped` says that the
    write before was still under way and nothing was saved. `problem` is what is known to have gone wrong: with the
    save before, or with this one if it was not asynchronous.
    """

    step: int
    blocked_s: float
    waited_s: float = 0.0
    skipped: bool = False
    problem: NotSaved | None = None


@dataclass(frozen=True)
class Loaded:
    """What was loaded. `skipped` are the generations that were passed over.

    `more` holds all else that was saved: tensors on the CPU, and for what was `PerRank` a list of all ranks' values.
    """

    step: int
    path: Path
    world_size: int
    more: dict[str, Any]
    skipped: tuple[Skipped, ...] = ()


def _seen(call: Callable[P, R]) -> Callable[P, R]:
    """Have the launcher see that this rank is in a checkpoint, which may take long."""

    @wraps(call)
    def seen(*args: P.args, **kwargs: P.kwargs) -> R:
        with own_progress().during(Phase.CHECKPOINT):
            return call(*args, **kwargs)

    return seen


class Checkpointer:
    """Keeps the newest `keep` generations of a run in `directory`.

        checkpointer = Checkpointer("runs/1/checkpoints", every_steps=50)
        if checkpointer.latest() is not None:
            step = checkpointer.load(model=model, optimizer=optimizer, loader=loader).step
        ...
        if checkpointer.due(step):
            checkpointer.save(step, model=model, optimizer=optimizer, loader=loader)
        ...
        checkpointer.wait()

    All methods but `close` are called by all ranks. Replicas are equal, so rank 0 writes, and one rank of each host
    that does not see rank 0's directory. A generation is written to a temporary directory, with a SHA-256 of every
    file, and gets its name when all of it is on disk; older ones are removed after that. A save that fails is told to
    all ranks by their next call, and training may go on. The writer keeps host memory for one copy of the state.

    The process that writes owns the directory, by a lock that ends with it: a save by another run raises UsageError on
    all ranks of that run. Loading needs no lock.

    `busy` says what a save does when the one before is still being written: "wait" or "skip". `timeout` is how long a
    rank waits for others to come to the same call, before it raises PeerAbsent; those that wait in another collective
    are found in seconds, without it.

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
        on_event: Callable[[Event], None] | None = None,
        group: Group = None,
        timeout: float | None = None,
        compare: bool = True,
    ) -> None:
        if type(keep) is not int or keep < 2:
            raise UsageError(f"keep must be a whole number of at least 2, got {keep!r}: one may be damaged")
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
        self._on_event = on_event or ignore
        self._group = group
        self._timeout = timeout
        self._compare = compare
        # Ten times as often as a save is due, so that it is at most a tenth late.
        self._cadence = Cadence((every_seconds or 0.0) / 10, group)
        self._saved_at = time.monotonic()
        self._writing: Writing | None = None
        self._staging = {MODEL: Staging(), STATE: Staging()}
        self._number = -1
        self._is_writer: bool | None = None
        self._versions = versions()
        self._refused: list[Path] = []
        self._lock = DirectoryLock(self.directory)

    def due(self, step: int) -> bool:
        """Whether `step` is one to save. Called in every step; by seconds, rank 0's clock decides for all ranks."""
        if self._every_steps is not None and step > 0 and step % self._every_steps == 0:
            return True
        if self._every_seconds is None:
            return False
        leads = here(self._group)[0] == 0
        return bool(self._cadence.ask(leads and time.monotonic() - self._saved_at >= self._every_seconds))

    @_seen
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
        arrive(f"Checkpointer.save({step})", self._group, self._timeout)
        snapshot = describe(model, optimizer, more, self._group)
        skip = self._busy == "skip" and self._writing is not None and not self._writing.done
        waiting = time.perf_counter()
        if not skip:
            self.close()
        waited_s = time.perf_counter() - waiting
        self._saved_at = time.monotonic()
        writes = self._writes()
        manifest, skip, problem = self._agree(step, snapshot, skip, self._own() if writes else "")
        if skip:
            self._on_event(Event("skipped", step, f"step {step} is not saved: the write before is still under way"))
        else:
            self._start(manifest, snapshot, writes=writes)
        if not skip and not self._asynchronous:
            problem = self._settle() or problem
        return Saved(step, time.perf_counter() - started, waited_s, skip, problem)

    @_seen
    def wait(self) -> None:
        """Return when what was saved is on disk. Raises NotSaved, on all ranks, if it could not be written."""
        arrive("Checkpointer.wait()", self._group, self._timeout)
        problem = self._settle()
        if problem is not None:
            raise problem

    def close(self) -> None:
        """Wait for this rank's writer, without a word to others. What became of it is told by the next other call."""
        if self._writing is not None:
            self._writing.join()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        self._lock.release()

    @_seen
    def latest(self) -> Generation | None:
        """The newest generation that is whole on all ranks, every byte compared, or None."""
        arrive("Checkpointer.latest()", self._group, self._timeout)
        self.close()
        return self._newest(self.directory, generations.verify)[0]

    @_seen
    def load(
        self,
        generation: "Literal['latest', 'compared'] | str | os.PathLike[str] | int | Generation" = "latest",
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **more: Any,
    ) -> Loaded:
        """Put a generation back into `model`, `optimizer`, and whatever of `more` has load_state_dict().

        `generation` is "latest" (the newest that is whole on all ranks), "compared" (the newest of those that ranks
        have compared when they saved it; if there is none, the newest of all), a step, or the path of a generation or
        of a directory of them. Every byte is compared before anything is changed. Raises NoCheckpoint if there is none
        that is whole on all ranks, and CheckpointMismatch if it is not of this model; both on all ranks. A replica in
        lanes is warned, by name, when the number of lanes or what chooses kernels is not what it was.
        """
        arrive("Checkpointer.load()", self._group, self._timeout)
        self.close()
        restored, skipped = self._read(generation)
        problem: CheckpointMismatch | None = None
        try:
            restored.check(model, optimizer, more)
        except CheckpointMismatch as error:
            problem = error
        self._raise_together(problem)
        restored.put(model, optimizer, more)
        found = restored.generation
        if (unlike := restored.other_bits(model, more)) and here(self._group)[0] == 0:
            logger.warning(
                "step %d in %s was saved by a run whose bits this one will not repeat, then and now: %s",
                found.step,
                found.path,
                "; ".join(unlike),
            )
        return Loaded(found.step, found.path, found.manifest.world_size, restored.more, skipped)

    def _own(self) -> str:
        """Keep other runs from saving to the directory. Returns who does so already, or nothing."""
        try:
            make_directory(self.directory)
            return self._lock.acquire()
        except OSError:  # the write will meet it too, and tell
            return ""

    def _agree(self, step: int, snapshot: Snapshot, skip: bool, holder: str) -> tuple[Manifest, bool, NotSaved | None]:
        """The new generation, whether it is skipped, and what went wrong with the one before."""
        report = self._report()
        shapes = as_text(snapshot.shapes)
        own = [number_of(shapes), self._next_number(), bool(report), skip, secrets.randbits(60), bool(holder)]
        rows = gather(own, self._group)
        if any(row[5] for row in rows):
            self._refuse_second(gather_text(holder, self._group))
        if len({row[0] for row in rows}) > 1:
            raise different_models(gather_text(shapes, self._group))
        self._number = max(row[1] for row in rows)
        problem = self._tell(report) if any(row[2] for row in rows) else None
        manifest = Manifest(
            *(step, self._number, rows[0][4], len(rows), {}, snapshot.shapes, self._versions),
            compared=len(rows) if self._compare else 0,
        )
        return manifest, any(row[3] for row in rows), problem

    def _refuse_second(self, holders: Sequence[str]) -> NoReturn:
        rank, holder = next((rank, text) for rank, text in enumerate(holders) if text)
        raise UsageError(
            f"rank {rank} cannot save to {self.directory}: {holder} saves there, and two runs in one directory would "
            f"remove each other's checkpoints; give this run a directory of its own, or end the other one"
        )

    def _settle(self) -> NotSaved | None:
        self.close()
        return self._tell(self._report())

    def _report(self) -> str:
        """What this rank's finished write came to, as text for all ranks; empty if it went well or there was none."""
        write = self._writing
        if write is None or not write.done:
            return ""
        self._writing = None
        if write.error is None:
            assert write.generation is not None
            text = f"step {write.step} is saved ({write.seconds:.2f} s in the background)"
            self._on_event(Event("saved", write.step, text, str(write.generation.path), write.seconds))
            if write.untidy is not None:
                self._on_event(Event("left", write.step, f"older checkpoints could not be removed: {write.untidy}"))
            for path in write.removed:
                self._on_event(Event("removed", generations.step_of(path), f"{path.name} is removed", str(path)))
            return ""
        kept = generations.listed(self.directory) if os.access(self.directory, os.R_OK | os.X_OK) else []
        text = (
            f"the checkpoint of step {write.step} could not be written to {self.directory} "
            f"({type(write.error).__name__}: {write.error}); still there: "
            f"{', '.join(path.name for path in kept) or 'no other'}"
        )
        return json.dumps([write.step, text])

    def _tell(self, report: str) -> NotSaved | None:
        for rank, told in enumerate(gather_text(report, self._group)):
            if told:
                step, text = json.loads(told)
                self._on_event(Event("failed", step, text))
                return NotSaved(f"rank {rank}: {text}", step=step, rank=rank)
        return None

    def _next_number(self) -> int:
        if self._number < 0:
            try:
                found, _ = generations.survey(self.directory)
            except OSError:  # the write will meet it too, and tell
                found = []
            self._number = max((one.manifest.number for one in found), default=0)
        return self._number + 1

    def _writes(self) -> bool:
        if self._is_writer is None:
            self._is_writer = is_writer(self.directory, self._group)
        return here(self._group)[0] == 0 if self._is_writer is None else self._is_writer

    def _start(self, manifest: Manifest, snapshot: Snapshot, *, writes: bool) -> None:
        """Copy the state, compare it with that of the others, and have it written. All ranks call it."""
        failed: Exception | None = None
        if writes:
            try:
                self._staging[MODEL].take(snapshot.model)
                self._staging[STATE].take(snapshot.state)
            except (RuntimeError, MemoryError) as error:  # no memory for the copy; told as if it could not be written
                failed = error
        words: list[Words] = []
        if self._compare and manifest.world_size > 1:
            words = compare(manifest.step, snapshot.replicated(snapshot.model, snapshot.state), self._group)
        if not writes:
            return

        def write() -> Generation:
            if failed is not None:
                raise failed
            with suppress(OSError):  # first of all, because it may make room; `tidy` tries again, and tells
                generations.remove_abandoned(self.directory)
            files: dict[str, Parts] = {name: staging.parts() for name, staging in self._staging.items()}
            files[TREE] = [snapshot.tree]
            written = write_generation(self.directory, manifest, files, check=check)
            self._refused = [path for path in self._refused if path != written.path]
            return written

        def check() -> None:
            if words:
                copies = (self._staging[name].taken() for name in (MODEL, STATE))
                check_copy(snapshot.replicated(*copies), words)

        def tidy() -> list[Path]:
            generations.remove_abandoned(self.directory)
            return generations.remove_older(self.directory, self._keep, self._refused)

        self._writing = Writing(manifest.step, write, tidy, asynchronous=self._asynchronous)

    def _newest(
        self, directory: Path, check: Callable[[Generation], None], step: int | None = None, *, compared: bool = False
    ) -> tuple[Generation | None, tuple[Skipped, ...]]:
        try:
            found, broken = generations.survey(directory)
        except OSError as error:
            found, broken = [], [Damaged(directory, f"it cannot be listed: {error.strerror}")]
        if step is not None:
            found = [one for one in found if one.step == step]
            broken = [one for one in broken if generations.step_of(one.path) in (step, -1)]
        preferred = [one for one in found if one.manifest.compared or not compared]
        chosen, skipped = newest_on_all(preferred, broken, check, self._group)
        if chosen is None and compared:
            chosen, skipped = newest_on_all(found, broken, check, self._group)
        fresh = [one for one in skipped if directory / one.path not in self._refused]
        for one in fresh:
            self._refused.append(directory / one.path)
            path = directory / one.path
            self._on_event(Event("refused", generations.step_of(path), str(one), str(path)))
        return chosen, skipped

    def _read(self, which: str | os.PathLike[str] | int | Generation) -> tuple[Restored, tuple[Skipped, ...]]:
        held: dict[Path, Restored] = {}

        def check(generation: Generation) -> None:
            held.clear()
            held[generation.path] = Restored(generation, *here(self._group))

        if isinstance(which, Generation):
            which = which.path
        if isinstance(which, int):
            what, (found, skipped) = f"of step {which} in {self.directory}", self._newest(self.directory, check, which)
        elif which in ("latest", "compared"):
            what, (found, skipped) = (
                f"in {self.directory}",
                self._newest(self.directory, check, compared=which == "compared"),
            )
        else:
            what, (found, skipped) = f"at {which}", self._at(Path(which), check)
        if found is None:
            why = "; ".join(map(str, skipped))
            raise NoCheckpoint(
                f"there is no checkpoint {what} that is whole on all ranks" + (f": {why}" if why else ""),
                skipped=skipped,
            )
        return held[found.path], skipped

    def _at(self, path: Path, check: Callable[[Generation], None]) -> tuple[Generation | None, tuple[Skipped, ...]]:
        """The generation at `path`, or the newest in it. Which of the two it is may differ between ranks."""
        if not NAME.match(path.name) and not os.path.lexists(path / FILE):
            return self._newest(path, check)
        try:
            return newest_on_all([generations.read(path)], [], check, self._group)
        except Damaged as error:
            return newest_on_all([], [error], check, self._group)

    def _raise_together(self, problem: CheckpointMismatch | None) -> None:
        """Raise on all ranks if there is a problem on any, so that none is changed."""
        for rank, text in enumerate(gather_text("" if problem is None else str(problem), self._group)):
            if text:
                raise problem or CheckpointMismatch(f"rank {rank}: {text}")
