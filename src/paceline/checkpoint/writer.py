"""Writing snapshots and exported weights, atomically."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from paceline.bare import bare
from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.checkpoint_errors import CheckpointError, NotSaved
from paceline.checkpoint.joint import JointWrite
from paceline.checkpoint.manifest import Manifest, file_name
from paceline.checkpoint.snapshots import Snapshot, held, name_of, temporary
from paceline.checkpoint.state import HostCopy
from paceline.errors import UsageError
from paceline.stored.directory import (
    FileRecord,
    fsync_directory,
    fsync_open_directory,
    make_directory,
    replace_file,
    write_file,
)
from paceline.stored.json_tree import NATIVE

NICENESS = 10

Parts = Sequence[bytes | memoryview]


def write_snapshot(
    directory: Path,
    manifest: Manifest,
    files: Mapping[str, Parts],
    *,
    check: Callable[[], None] | None = None,
    joint: JointWrite | None = None,
) -> Snapshot:
    """Write `files` and their manifest to a temporary directory, and rename it when everything is on disk.

    Raises OSError if that fails; then nothing of it is left. `check` is called when everything is written, and may
    still refuse it by raising. `joint` are the other ranks that write to it; they are waited for.
    """
    make_directory(directory)
    name = name_of(directory, manifest.step)
    home = temporary(directory, name, "new") if joint is None else joint.home
    if joint is None:
        home.mkdir()
    try:
        with held(home) if joint is None else closing(joint) as holder:
            descriptor = holder if isinstance(holder, int) else holder.descriptor
            try:
                records = _write_files(home, files, check)
            finally:  # also if this rank has failed: files that others are writing are not removed
                others, problem = ({}, "") if joint is None else joint.collect()
            if problem:
                raise CheckpointError(problem)
            if joint is not None:
                joint.remove_records()
            complete = replace(manifest, files=records | others)
            write_file(home / file_name(manifests.FILE, manifest.ranks[0]), [manifests.to_bytes(complete)])
            fsync_open_directory(descriptor)
            home.rename(directory / name)
    except BaseException:
        with suppress(OSError):  # the first error is the one to report; the next save removes what is left
            shutil.rmtree(home)
        raise
    fsync_directory(directory)
    return Snapshot(directory / name, complete)


def write_part(files: Mapping[str, Parts], check: Callable[[], None], joint: JointWrite) -> None:
    """Write this rank's files of a snapshot that another rank completes, and tell that rank the outcome."""
    with closing(joint):
        try:
            joint.leave(_write_files(joint.home, files, check), "")
        except Exception as error:
            joint.leave({}, f"{type(error).__name__}: {error}")
            raise


def _write_files(home: Path, files: Mapping[str, Parts], check: Callable[[], None] | None) -> dict[str, FileRecord]:
    records = {name: write_file(home / name, parts) for name, parts in files.items()}
    if check is not None:
        check()
    return records


def export_weights(model: nn.Module, path: str | Path) -> Path:
    """Write the weights of `model` to one safetensors file, and return its path. One rank is enough.

    The names are those of the bare model, without wrappers, so that
    `model.load_state_dict(safetensors.torch.load_file(path))` works. Tied weights are written under each of their
    names. An existing file is replaced when the new one is on disk. Raises NotSaved if that fails.
    """
    path = Path(path)
    tensors = {}
    for name, value in bare(model).state_dict().items():
        if not isinstance(value, torch.Tensor) or value.dtype not in NATIVE:
            got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise UsageError(f"{name} cannot be exported: expected a tensor of a dtype that safetensors has, got {got}")
        tensors[name] = value
    copy = HostCopy()
    copy.take(tensors)
    try:
        make_directory(path.parent)
        replace_file(path, copy.parts())
    except OSError as error:
        raise NotSaved(f"the weights could not be written to {path}: {error}", step=-1, rank=0) from error
    return path


class BackgroundWrite:
    """Runs `work`, which writes a snapshot or a part of one, and then, on the rank that completed it, `tidy`, which
    removes older ones; in a thread if `asynchronous`.

    A process that ends normally waits for it.
    """

    def __init__(
        self,
        step: int,
        work: Callable[[], Snapshot | None],
        tidy: Callable[[Snapshot], list[Path]],
        *,
        asynchronous: bool,
    ) -> None:
        self.step = step
        self.error: BaseException | None = None
        self.snapshot: Snapshot | None = None
        self.seconds = 0.0
        self.removed: list[Path] = []
        self.untidy: OSError | None = None
        self._work = work
        self._tidy = tidy
        self._thread: threading.Thread | None = None
        if asynchronous:
            # Not a daemon: Python joins it before the interpreter exits.
            self._thread = threading.Thread(target=self._run_beside, name=f"checkpoint of step {step}", daemon=False)
            self._thread.start()
        else:
            self._run()

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run_beside(self) -> None:
        with suppress(OSError):
            # On Linux a thread has its own niceness: training has priority.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        self._run()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self.snapshot = self._work()
        except BaseException as error:  # noqa: BLE001 - kept, and reported on all ranks by the Checkpointer
            self.error = error
        else:
            try:
                self.removed = [] if self.snapshot is None else self._tidy(self.snapshot)
            except OSError as error:
                self.untidy = error
        self.seconds = time.perf_counter() - started
