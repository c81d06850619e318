"""Failure capsules: one file that holds a step that went wrong, so that it can be run again elsewhere.

On a finding that all ranks share (drift, gradients that are not finite) the batches of all of them are gathered, and
the first rank at fault writes. When one rank crashes, it writes what it has itself. Nothing in here raises: what went
wrong in the step is what has to be told.
"""

import atexit
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.agree.capsule import UNKNOWN_ERROR, Capsule, Kind, capsule_bytes, capsule_from, write_capsule
from paceline.agree.word import readable, word_of
from paceline.collectives.api import Transport
from paceline.collectives.wait import finish
from paceline.kernels import kernel_settings
from paceline.randomness import rng_state
from paceline.reducer.lanes import LaneState
from paceline.reducer.reducer import Reducer
from paceline.replica.agreement import Agreement
from paceline.replica.lane_buffers import COMPARED_BYTES, LaneBuffers

logger = logging.getLogger("paceline")

KEPT_STAMPS = 64
KEPT_FORWARDS = 64  # of one step
KEPT_FINDINGS = 8  # of each kind: each holds the whole model
GATHERED_BYTES = 1 << 30  # batches of all ranks are put together up to this size

_writers: "weakref.WeakSet[CapsuleWriter]" = weakref.WeakSet()


class CapsuleWriter:
    """Keeps what the current step was given, and writes it down when something goes wrong."""

    def __init__(
        self,
        agreement: Agreement,
        core: Reducer,
        module: nn.Module,
        seed: int,
        device: torch.device,
        buffers: LaneBuffers | None,
    ) -> None:
        assert agreement.capsules is not None
        self._folder = Path(agreement.capsules)
        self._about = agreement.about
        self._buffers = buffers
        self._core = core
        self._module = module
        self._seed = seed
        self._device = device
        self._step = 0
        self._batch: list[Any] | None = None
        self._given: list[tuple[str, torch.Tensor, int]] = []  # its tensors, and how often they had been written to
        self._found: dict[str, torch.Tensor] = {}  # buffers before the forward, which may change them
        self._before: tuple[Any, ...] | None = None  # the same of the step before, where findings come late
        self._told = ""  # of this step, that it crashed
        self._findings: Counter[str] = Counter()
        core.on_failed = self.on_failed_backward
        _writers.add(self)

    def note_lanes(self, micros: Sequence[Any], step: int) -> None:
        """A step of lanes begins. Its random numbers follow from the seed."""
        self._begin(step)
        self._add(list(micros))

    def note_forward(self, inputs: Any, kwargs: Any) -> None:
        """A forward outside lanes begins. A step may have several, one for each of its micros or even more."""
        if not torch.is_grad_enabled():
            return
        step = self._core.reductions + 1  # the one that this forward leads to
        if self._batch is None or step != self._step or len(self._batch) >= KEPT_FORWARDS:
            self._begin(step)
            small = ((name, b) for name, b in self._module.named_buffers() if b.nbytes <= COMPARED_BYTES)
            self._found = {name: buffer.detach().clone() for name, buffer in small}
        self._add([{"args": tuple(inputs), "kwargs": dict(kwargs), "rng": rng_state(self._device)}])

    def _begin(self, step: int) -> None:
        if self._core.ordered_by_streams:
            self._before = self._step, self._batch, self._given, self._found
        self._step, self._batch, self._given, self._told = step, [], [], ""

    def _add(self, batch: Sequence[Any]) -> None:
        assert self._batch is not None
        for number, part in enumerate(batch, start=len(self._batch)):
            tensors = _tensors(part, f"batch.{number}")
            self._given += [(name, t, t._version) for name, t in tensors if not t.is_inference()]
        self._batch += batch

    # ---- all ranks

    def on_finding(self, kind: Kind, text: str, ranks: Sequence[int], late: bool = False) -> None:
        """All ranks call it, in the same step. `late`: it is about the step before this one."""
        now = self._step, self._batch, self._given, self._found
        if late and self._before is not None:
            self._step, self._batch, self._given, self._found = self._before
        try:
            self._write_finding(kind, text, ranks)
        finally:
            self._step, self._batch, self._given, self._found = now

    def _write_finding(self, kind: Kind, text: str, ranks: Sequence[int]) -> None:
        transport = self._core.transport
        self._findings[kind] += 1
        wanted = self._findings[kind] <= KEPT_FINDINGS
        raw = self._own_bytes(kind, text, ranks) if wanted else b""
        gathered = _gather(raw, transport, self._core.group.timeout_s)
        if not wanted or transport.rank != (ranks[0] if ranks else 0):
            return
        try:
            self._write(self._whole(kind, text, ranks, gathered or []))
        except Exception as error:  # noqa: BLE001 (the finding itself has to be told)
            self._give_up(error)
        if self._findings[kind] == KEPT_FINDINGS:
            logger.warning("%d capsules of this kind are written; of later ones none will be", KEPT_FINDINGS)

    def _own_bytes(self, kind: Kind, text: str, ranks: Sequence[int]) -> bytes:
        """What this rank tells the one that writes; nothing if it cannot be put into bytes, so that none waits."""
        try:
            own = self._own(kind, text, ranks)
            if kind == "divergence":
                own = replace(own, settings={**own.settings, "words": self._words()})
            return capsule_bytes(own)
        except Exception as error:  # noqa: BLE001
            self._give_up(error)
            return b""

    def _whole(self, kind: Kind, text: str, ranks: Sequence[int], gathered: Sequence[bytes]) -> Capsule:
        rank, size = self._core.transport.rank, self._core.transport.size
        parts = [capsule_from(raw) for raw in gathered if raw]
        others = tuple(
            {"rank": p.rank, "lanes": p.lanes, "batch": p.batch, "rng": p.rng} for p in parts if p.rank != rank
        )
        capsule = replace(self._own(kind, text, ranks, state=True), others=others)
        if kind == "divergence" and len(parts) == size:
            by_tensor = {name: [p.settings["words"][name] for p in parts] for name in parts[0].settings["words"]}
            capsule = replace(capsule, settings={**capsule.settings, "words": by_tensor})
        return capsule

    def _words(self) -> dict[str, int]:
        """Of what is meant to be equal on all ranks: outside lanes buffers are not."""
        buffers = {name for name, _ in self._module.named_buffers()} if self._buffers is None else set()
        state = self._state()
        return {name: word_of([value]) for name, value in state.items() if name not in buffers and readable(value)}

    # ---- this rank alone

    def on_crash(self, error: BaseException) -> None:
        """Forward has raised."""
        lanes = self._core.lanes
        if not torch.is_grad_enabled() or (lanes is not None and lanes.state is not LaneState.OPEN):
            return  # an evaluation, of which nothing was noted
        self._crash(error)
        if lanes is None and self._batch:
            self._batch.pop()  # if the step goes on, it does so without it

    def on_failed_backward(self) -> None:
        """A backward has raised. It is heard of later, when the error itself may be forgotten."""
        self._crash(sys.exception())

    def on_lane_left(self) -> None:
        """The loop over lanes was left while a lane ran."""
        if self._core.backwards.failed():
            self._crash(None)

    def on_exit(self, error: BaseException) -> None:
        """The process ends with an error: if that was in a step, it has not been told yet."""
        core = self._core
        # Outside lanes: a forward of this step was run, and what was made of it has not been reduced.
        inside = core.ledger.forwards_pending if core.lanes is None else core.lanes.state is LaneState.OPEN
        if inside or core.backwards.failed():
            self._crash(error)

    def _crash(self, error: BaseException | None) -> None:
        if not self._batch or (self._told and (error is None or self._told != UNKNOWN_ERROR)):
            return
        self._told = UNKNOWN_ERROR if error is None else f"{type(error).__name__}: {error}"
        try:
            self._write(self._own("crash", self._told, [self._core.transport.rank], state=True))
        except Exception as failure:  # noqa: BLE001
            self._give_up(failure)

    # ---- what a capsule holds

    def _own(self, kind: Kind, text: str, ranks: Sequence[int], *, state: bool = False) -> Capsule:
        core = self._core
        batch = self._batch or []
        changed = [name for name, tensor, version in self._given if tensor._version != version]
        return Capsule(
            kind=kind,
            step=self._step,
            ranks=tuple(ranks),
            error=text,
            rank=core.transport.rank,
            world_size=core.transport.size,
            lanes=() if core.lanes is None else tuple(core.lanes.mine),
            seed=self._seed,
            settings={"kernels": kernel_settings(self._device), **self._about},
            rng=batch[0]["rng"] if batch and core.lanes is None else None,
            batch=self._batch,
            state=self._state() if state else {},
            collectives=tuple(
                f"{stamp.moment.value} of backward {stamp.backward}"
                + (f", bucket {stamp.bucket}" * (stamp.bucket >= 0))
                for stamp in core.trace.stamps()[-KEPT_STAMPS:]
            ),
            omitted=tuple(f"{name}: changed since the step was given it" for name in changed),
        )

    def _state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers as the step found them."""
        before = self._found if self._buffers is None else dict(self._buffers.before())
        state = self._module.state_dict()
        return {name: before.get(name, value) for name, value in state.items() if isinstance(value, torch.Tensor)}

    def _write(self, capsule: Capsule) -> None:
        path = self._folder / f"step-{capsule.step:08d}-{capsule.kind}-rank-{capsule.rank}.capsule"
        write_capsule(path, capsule)
        known = "train" in self._about  # the trainer's model is built by what is in the capsule
        how = "" if known else " --model module:function --loss module:function"
        logger.warning("what went wrong is in %s; run it again with: paceline replay %s%s", path, path, how)

    def _give_up(self, error: Exception) -> None:
        logger.warning("no failure capsule could be made in %s: %s: %s", self._folder, type(error).__name__, error)


@atexit.register
def _tell_of_the_end() -> None:
    """Python keeps the error that ends a script, and runs this after it was shown."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, Exception):
        for writer in list(_writers):
            writer.on_exit(error)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key != "rng":
                yield from _tensors(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _tensors(item, f"{name}.{number}")


def _gather(raw: bytes, transport: Transport, timeout_s: float | None) -> list[bytes] | None:
    """The bytes of all ranks, or None if they are too many."""
    lengths = torch.empty(transport.size, dtype=torch.int64, device="cpu")
    work = transport.all_gather(lengths, torch.tensor([len(raw)], dtype=torch.int64, device="cpu"))
    finish(work, what="the sizes of capsules", watch=transport.watch, timeout_s=timeout_s)
    longest = int(lengths.max())
    if not longest:
        return [b""] * transport.size
    if longest * transport.size > GATHERED_BYTES:
        return None
    padded = torch.frombuffer(bytearray(raw.ljust(longest, b"\0")), dtype=torch.uint8)
    gathered = torch.empty(transport.size, longest, dtype=torch.uint8, device="cpu")
    work = transport.all_gather(gathered.view(-1), padded)
    finish(work, what="the batches of all ranks", watch=transport.watch, timeout_s=timeout_s)
    return [row[:length].numpy().tobytes() for row, length in zip(gathered, lengths.tolist(), strict=True)]
