"""The lanes of a replica, as the user's loop runs them: `for batch in model.lanes(microbatches, step)`.

A loop may be left at any time: by an error, by break, or because zip() has ended with its other iterable. A generator
is only closed when it is released, which may be as late as the end of the process. So either that or the next step,
whichever comes first, ends the loop (`LaneLoop._leave`), and nothing is done when Python itself exits.
"""

import logging
import operator
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from paceline.blocks import listed
from paceline.errors import UsageError
from paceline.randomness import Kept, mixed
from paceline.reducer.autograd import tensors_in
from paceline.reducer.lane_batch import LaneBatch
from paceline.reducer.lanes import Shapes
from paceline.reducer.reducer import Reducer
from paceline.replica.agreement import Agreement
from paceline.replica.capsules import CapsuleWriter
from paceline.replica.lane_audit import LaneAudit
from paceline.replica.lane_buffers import LaneBuffers
from paceline.replica.recording import Recording

logger = logging.getLogger("paceline")

Microbatch = TypeVar("Microbatch")

NO_GRADIENTS = (
    "the gradients of step %d were dropped before its loop over lanes ended, and no optimizer had used them: call "
    "optimizer.zero_grad() after optimizer.step(), outside the loop"
)
SAME_STEP = (
    "step %d was run before, so its random numbers, which follow from (seed, step, lane), are the same again; pass "
    "the number of the current step to model.lanes(microbatches, step)"
)


@dataclass(slots=True)
class _Loop:
    """A loop that has begun and not ended."""

    step: int
    kept: Kept
    audit: LaneAudit | None
    lane: int = -1  # the current one of this rank's lanes


class LaneLoop:
    """Runs this rank's lanes of a step in order, each with its own randomness and from the same buffers."""

    def __init__(
        self,
        core: Reducer,
        buffers: LaneBuffers,
        capsules: CapsuleWriter | None,
        recording: Recording | None,
        audits: Agreement | None,
        seed: int,
        device: torch.device,
    ) -> None:
        """`audits`: the agreement, if lanes are audited."""
        assert isinstance(core.batch, LaneBatch)
        self._core = core
        self._batch_share = core.batch
        self._lanes = core.batch.lanes
        self._seed = seed
        self._device = device
        self._capsules = capsules
        self._recording = recording
        self._audits = audits
        self.buffers = buffers
        self._loop: _Loop | None = None
        self._last: int | None = None  # the last step
        self._warned: set[str] = set()

    def run(self, microbatches: Iterable[Microbatch], step: int) -> Iterator[Microbatch]:
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "a step of lanes cannot go into a CUDA graph: its random numbers are seeded, and its gradients "
                "exchanged, from the host; capture a replica without lanes, or run lanes outside the capture"
            )
        self._leave(waits=True)  # the previous loop, if it has not ended
        stale = self._batch_share.begin_step()
        try:
            given = list(microbatches)
            self._check(len(given), stale)
        except BaseException:
            self._owe(step)
            raise
        loop = self._begin(given, step)
        handled, python_ends = sys.exception(), sys.is_finalizing
        try:
            for lane, microbatch in zip(self._lanes.mine, given, strict=True):
                loop.kept.seed(mixed(self._seed, step, lane))
                loop.lane = lane
                self._lanes.open(lane, _shapes(microbatch))
                yield microbatch
                self._check_current(loop)
                self._end_lane(loop)
            if loop.audit is not None and self._core.step_state.has_gradients:
                yield from self._audit(loop, loop.audit)
            self._end_step(loop)
        except GeneratorExit as left:
            if not python_ends() and self._loop is loop:
                self._hear_of_leaving(waits=left.__context__ is handled)
            raise
        except BaseException:
            if self._loop is loop:
                self._leave(waits=False)
            raise

    @property
    def repeats(self) -> bool:
        """Whether the current lane belongs to another rank and is repeated for an audit."""
        return self._loop is not None and self._loop.audit is not None and self._loop.audit.repeating

    def _audit(self, loop: _Loop, audit: LaneAudit) -> Iterator[Any]:
        """This rank's lanes have run, and the step is reduced: compare one lane of the step, and repeat it if it is
        this rank's turn to do so."""
        for microbatch in audit.rounds:
            loop.kept.seed(mixed(self._seed, loop.step, audit.audit.lane))
            audit.begin_repeat()
            yield microbatch
            self._check_current(loop)
            audit.end_repeat()
            self.buffers.lane_repeated()

    def begin_anew(self) -> None:
        """Reset for another set of ranks, whose reducer has dropped the current step. They may repeat it."""
        self._leave(waits=False)
        if self._loop is not None and self._loop.audit is not None:
            self._loop.audit.cancel()
        self._loop = self._last = None
        self.buffers.begin_anew()
        self.buffers.begin()

    def _check_current(self, loop: _Loop) -> None:
        if self._loop is not loop:
            raise UsageError(
                f"the loop over model.lanes() for step {loop.step} resumed after another such loop had started"
            )

    def _check(self, given: int, stale: str | None) -> None:
        lanes, transport = self._lanes, self._core.transport
        if stale is not None:
            raise UsageError(
                f"a step of lanes starts from empty gradients, but {stale} already has one; call "
                f"optimizer.zero_grad() first"
            )
        if given != len(lanes.mine):
            raise UsageError(
                f"rank {transport.rank} of {transport.size} runs {len(lanes.mine)} of {lanes.count} lanes "
                f"({listed(lanes.mine)}) and needs a microbatch for each of them, got {given}; "
                f"paceline.Loader(..., lanes={lanes.count}) distributes them"
            )

    def _owe(self, step: int) -> None:
        """The step cannot begin here, but other ranks may run it: inform them as for any loop that was left."""
        self._batch_share.owe(step)
        if self._capsules is not None:
            self._capsules.note_lanes((), step)

    def _begin(self, given: Sequence[object], step: int) -> _Loop:
        if step == self._last:
            self._warn(SAME_STEP, step)
        self._lanes.step = step
        self.buffers.begin()
        if self._core.schedule.observer is not None:
            self._core.schedule.observer.begin(step)
        if self._capsules is not None:
            self._capsules.note_lanes(given, step)
        if self._recording is not None:
            self._recording.begin(step)
        audit = None if self._audits is None else LaneAudit.begin(self._audits, self._core, given, step, self._capsules)
        self._loop = _Loop(step, Kept(self._device), audit)
        return self._loop

    def _end_lane(self, loop: _Loop) -> None:
        self._batch_share.check_ended()
        self.buffers.lane_ended(loop.lane)
        loop.lane = -1

    def _end_step(self, loop: _Loop) -> None:
        """All lanes have run here, and on all other ranks too if there are gradients."""
        self._loop = None
        loop.kept.put_back()
        core = self._core
        if not core.step_state.has_gradients:  # the step leaves no trace
            if loop.audit is not None:
                loop.audit.cancel()
            return
        if loop.audit is not None:
            loop.audit.finish()
        self._last = loop.step
        slots = () if core.optimizes_in_backward or not core.step_state.reductions_since_step else core.bucket_set.slots
        if slots and (core.uses is None or any(core.uses)) and all(slot.param.grad is None for slot in slots):
            self._warn(NO_GRADIENTS, loop.step)
        self.buffers.end(core.group)

    # ---- a loop that was left

    def _hear_of_leaving(self, *, waits: bool) -> None:
        """An error here would be raised in a destructor, where it cannot be caught."""
        if self._capsules is not None:
            self._capsules.on_lane_left()
        try:
            self._leave(waits=waits)
        except Exception as error:  # noqa: BLE001
            logger.warning("the loop over the lanes of step %d could not be ended: %s", self._lanes.step, error)

    def _leave(self, *, waits: bool) -> None:
        """End the most recent loop, if it has not ended. Without `waits`, do not wait for other ranks:
        then buffers that the others exchange after a complete step are owed until the next step begins."""
        loop = self._loop
        if loop is None:
            return
        if loop.lane >= 0:
            self.buffers.lane_ended(loop.lane)  # restores them to the start of the step
            loop.lane = -1
        if loop.audit is not None:
            if loop.audit.repeating:
                self.buffers.lane_repeated()
            loop.audit.leave()
        loop.kept.put_back(late=True)
        if waits or not self._core.step_state.has_gradients:
            self._end_step(loop)

    def _warn(self, text: str, step: int) -> None:
        """Warn once, on one rank."""
        if text not in self._warned and self._core.transport.rank == 0:
            self._warned.add(text)
            logger.warning(text, step)


def step_of(step: object) -> int:
    """The user's number of a step, checked."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = 1 << 63
    if not -(1 << 63) <= number < 1 << 63:
        raise UsageError(
            f"model.lanes(microbatches, step): step must be a whole number, the same on every rank and a new one in "
            f"every step, got {step!r}"
        )
    return number


def _shapes(microbatch: object) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(microbatch))
