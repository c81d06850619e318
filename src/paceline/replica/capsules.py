"""Writes failure capsules: files that hold a failed step, so that it can be rerun elsewhere.

On a finding that all ranks share (drift, gradients that are not finite) the batches of all of them are gathered, and
the first rank at fault writes. A rank that crashes writes its own data. Nothing in this file raises an error, which
would hide the error of the step.
"""

import atexit
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.agree.capsule import UNKNOWN_ERROR, Capsule, Kind, encodable, write_capsule
from paceline.agree.state_digest import readable, state_digest
from paceline.collectives.gather import gather_bytes, gather_ints
from paceline.collectives.group import Group
from paceline.kernels import kernel_settings
from paceline.randomness import rng_state
from paceline.reducer.lanes import LaneState
from paceline.reducer.reducer import Reducer
from paceline.replica.agreement import Agreement
from paceline.replica.lane_buffers import COMPARED_BYTES, LaneBuffers
from paceline.stored.packed import pack, unpack

logger = logging.getLogger("paceline")

KEPT_STAMPS = 64
KEPT_FORWARDS = 64  # of one step
KEPT_FINDINGS = 8  # of each kind: each holds the whole model
GATHERED_BYTES = 1 << 30  # batches of all ranks are put together up to this size

_writers: "weakref.WeakSet[CapsuleWriter]" = weakref.WeakSet()


@dataclass
class _StepInputs:
    """The inputs of a step."""

    step: int = 0
    batch: list[Any] | None = None
    versions: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)  # of its tensors, by their names
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # before the forward, which may change them

    def add(self, batch: Sequence[Any]) -> None:
        assert self.batch is not None
        for number, part in enumerate(batch, start=len(self.batch)):
            tensors = _tensors(part, f"batch.{number}")
            self.versions += [(name, t, t._version) for name, t in tensors if not t.is_inference()]
        self.batch += batch

    def changed(self) -> list[str]:
        """The input tensors that were written to since the step began."""
        return [name for name, tensor, version in self.versions if tensor._version != version]


class CapsuleWriter:
    """Keeps the inputs of the current step, and writes them to a file when the step fails. Holds no module, because a
    module may refer to its replica."""

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
        self._known_module = weakref.ref(module)
        self._seed = seed
        self._device = device
        self._current = _StepInputs()
        self._previous: _StepInputs | None = None  # for findings that come one step late
        self._crashed = ""  # the error of this step for which a capsule was written
        self._findings: Counter[str] = Counter()
        _writers.add(self)

    @property
    def _module(self) -> nn.Module:
        module = self._known_module()
        assert module is not None, "steps are made by a replica, which holds it"
        return module

    def note_lanes(self, microbatches: Sequence[Any], step: int) -> None:
        """A step of lanes begins. Its random numbers follow from the seed."""
        self._begin(step).add(list(microbatches))

    def note_forward(self, inputs: Any, kwargs: Any) -> None:
        """A forward outside lanes begins. A step may have several, one for each of its microbatches or even more."""
        if not torch.is_grad_enabled():
            return
        step = self._core.reductions_begun + 1  # the one that will reduce this forward
        now = self._current
        if now.batch is None or step != now.step or len(now.batch) >= KEPT_FORWARDS:
            now = self._begin(step)
            small = ((name, b) for name, b in self._module.named_buffers() if b.nbytes <= COMPARED_BYTES)
            now.buffers = {name: buffer.detach().clone() for name, buffer in small}
        now.add([{"args": tuple(inputs), "kwargs": dict(kwargs), "rng": rng_state(self._device)}])

    def _begin(self, step: int) -> _StepInputs:
        if self._core.schedule.stream_ordered:
            self._previous = self._current
        self._current, self._crashed = _StepInputs(step, []), ""
        return self._current

    # ---- all ranks

    def on_finding(self, kind: Kind, text: str, ranks: Sequence[int], late: bool = False) -> None:
        """All ranks call it, in the same step. `late`: it concerns the previous step."""
        inputs = self._previous if late and self._previous is not None else self._current
        transport = self._core.transport
        self._findings[kind] += 1
        wanted = self._findings[kind] <= KEPT_FINDINGS
        raw = self._own_bytes(inputs, kind) if wanted else b""
        gathered = _gather(raw, self._core.group)
        if not wanted or transport.rank != (ranks[0] if ranks else 0):
            return
        try:
            self._write(self._whole(inputs, kind, text, ranks, gathered or []))
        except Exception as error:  # noqa: BLE001 (the finding itself has to be raised)
            self._warn_of_none(error)
        if self._findings[kind] == KEPT_FINDINGS:
            logger.warning("%d capsules of kind %r were written; no more will be", KEPT_FINDINGS, kind)

    def _own_bytes(self, inputs: _StepInputs, kind: Kind) -> bytes:
        """The data that this rank sends to the writing rank; empty if it cannot be encoded, so that no rank waits."""
        try:
            digests = self._digests(inputs) if kind == "divergence" else {}
            given = encodable(self._given(inputs), ("the batch", "0"), [])  # the path that it has below
            return pack((given, digests), "the batch")
        except Exception as error:  # noqa: BLE001
            self._warn_of_none(error)
            return b""

    def _whole(
        self, inputs: _StepInputs, kind: Kind, text: str, ranks: Sequence[int], gathered: Sequence[bytes]
    ) -> Capsule:
        rank, size = self._core.transport.rank, self._core.transport.size
        parts = [unpack(torch.frombuffer(bytearray(raw), dtype=torch.uint8)) for raw in gathered if raw]
        others = tuple(given for given, _ in parts if given["rank"] != rank)
        capsule = replace(self._own(inputs, kind, text, ranks), others=others, state=self._state(inputs))
        if kind == "divergence" and len(parts) == size:
            by_rank = [digests for _, digests in parts]
            by_tensor = {name: [digests[name] for digests in by_rank] for name in by_rank[0]}
            capsule = replace(capsule, settings={**capsule.settings, "words": by_tensor})
        return capsule

    def _digests(self, inputs: _StepInputs) -> dict[str, int]:
        """Digests of the state that should be equal on all ranks, which excludes buffers outside lanes."""
        left_out = {name for name, _ in self._module.named_buffers()} if self._buffers is None else set()
        state = {name: value for name, value in self._state(inputs).items() if name not in left_out}
        return {name: state_digest([value]) for name, value in state.items() if readable(value)}

    # ---- this rank alone

    def on_crash(self, error: BaseException) -> None:
        """Forward has raised."""
        lanes = self._core.batch.lanes
        if not torch.is_grad_enabled() or (lanes is not None and lanes.state is not LaneState.OPEN):
            return  # an evaluation, which is not recorded
        self._crash(error)
        if lanes is None and self._current.batch:
            self._current.batch.pop()  # if the step continues, it is without this forward

    def on_failed_backward(self) -> None:
        """A backward has raised. This is known only later, when the error itself may be gone."""
        self._crash(sys.exception())

    def on_lane_left(self) -> None:
        """The loop over lanes was left while a lane ran."""
        if self._core.backwards.failed():
            self._crash(None)

    def on_exit(self, error: BaseException) -> None:
        """The process ends with an error: if that happened in a step, there is no capsule of it yet."""
        core = self._core
        # Outside lanes: a forward of this step was run, and what was made of it has not been reduced.
        inside = (
            core.step_state.forwards_pending if core.batch.lanes is None else core.batch.lanes.state is LaneState.OPEN
        )
        if inside or core.backwards.failed():
            self._crash(error)

    def _crash(self, error: BaseException | None) -> None:
        inputs, lanes = self._current, self._core.batch.lanes
        if lanes is not None and not lanes.reduces:  # the lane of another rank, whose microbatch this rank does not own
            return
        if not inputs.batch or (self._crashed and (error is None or self._crashed != UNKNOWN_ERROR)):
            return
        self._crashed = UNKNOWN_ERROR if error is None else f"{type(error).__name__}: {error}"
        try:
            own = self._own(inputs, "crash", self._crashed, [self._core.transport.rank])
            self._write(replace(own, state=self._state(inputs)))
        except Exception as failure:  # noqa: BLE001
            self._warn_of_none(failure)

    # ---- what a capsule holds

    def _own(self, inputs: _StepInputs, kind: Kind, text: str, ranks: Sequence[int]) -> Capsule:
        """The capsule without the state, which only the writing rank adds."""
        core = self._core
        return Capsule(
            kind=kind,
            step=inputs.step,
            ranks=tuple(ranks),
            error=text,
            **self._given(inputs),
            world_size=core.transport.size,
            seed=self._seed,
            settings={"kernels": kernel_settings(self._device), **self._about},
            collectives=tuple(
                f"{stamp.moment.value} of backward {stamp.backward}"
                + (f", bucket {stamp.bucket}" * (stamp.bucket >= 0))
                + (f" ({stamp.collective})" if stamp.collective is not None else "")
                for stamp in core.trace.stamps()[-KEPT_STAMPS:]
            ),
            omitted=tuple(f"{name}: changed since the step began" for name in inputs.changed()),
        )

    def _given(self, inputs: _StepInputs) -> dict[str, Any]:
        """This rank's inputs of the step."""
        lanes = self._core.batch.lanes
        return {
            "rank": self._core.transport.rank,
            "lanes": () if lanes is None else tuple(lanes.mine),
            "batch": inputs.batch,
            "rng": inputs.batch[0]["rng"] if inputs.batch and lanes is None else None,
        }

    def _state(self, inputs: _StepInputs) -> dict[str, torch.Tensor]:
        """Parameters and buffers at the start of the step."""
        before = inputs.buffers if self._buffers is None else dict(self._buffers.before())
        state = self._module.state_dict()
        return {name: before.get(name, value) for name, value in state.items() if isinstance(value, torch.Tensor)}

    def _write(self, capsule: Capsule) -> None:
        path = self._folder / f"step-{capsule.step:08d}-{capsule.kind}-rank-{capsule.rank}.capsule"
        write_capsule(path, capsule)
        known = "train" in self._about  # the trainer's model is built by what is in the capsule
        how = "" if known else " --model module:function --loss module:function"
        logger.warning("the failed step is in %s; run it again with: paceline replay %s%s", path, path, how)

    def _warn_of_none(self, error: Exception) -> None:
        logger.warning("no failure capsule could be made in %s: %s: %s", self._folder, type(error).__name__, error)


@atexit.register
def _write_at_exit() -> None:
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


def _gather(raw: bytes, group: Group) -> list[bytes] | None:
    """The bytes of all ranks, or None if they are too many."""
    lengths = gather_ints(group, [len(raw)], "the sizes of capsules")
    if max(lengths)[0] * group.size > GATHERED_BYTES:
        return None
    return gather_bytes(group, raw, "the batches of all ranks")
