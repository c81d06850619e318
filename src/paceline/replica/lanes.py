"""The lanes of a replica, as the user's loop runs them: `for batch in model.lanes(micros, step)`."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.randomness import mixed, put_back, seed_all
from paceline.reducer import lane_step
from paceline.reducer.agreement import Mode
from paceline.reducer.lanes import LaneState
from paceline.reducer.reducer import Reducer
from paceline.replica.capsules import CapsuleWriter
from paceline.replica.lane_buffers import LaneBuffers
from paceline.replica.outputs import tensors_in
from paceline.replica.recording import Recording

Micro = TypeVar("Micro")
Shapes = tuple[tuple[int, ...], ...]


class LaneLoop:
    """Runs this rank's lanes of a step in order, each with its own randomness and from the same buffers."""

    def __init__(self, core: Reducer, module: nn.Module, ignored: set[str], seed: int, device: torch.device) -> None:
        assert core.lanes is not None
        self._core = core
        self._seed = seed
        self._device = device
        self.capsules: CapsuleWriter | None = None
        self.recording: Recording | None = None
        self.buffers = LaneBuffers(module, ignored, core.lanes)
        self._shapes: Shapes | None = None  # of every micro that does not say how much it counts

    def run(self, micros: Iterable[Micro], step: int) -> Iterator[Micro]:
        core, lanes = self._core, self._core.lanes
        assert lanes is not None
        given = list(micros)
        if len(given) != len(lanes.mine):
            raise UsageError(
                f"rank {core.transport.rank} of {core.transport.size} runs {len(lanes.mine)} of {lanes.count} lanes "
                f"({_listed(lanes.mine)}) and needs a micro for each of them, got {len(given)}; "
                f"paceline.Loader(..., lanes={lanes.count}) deals them"
            )
        if (stale := lane_step.begin(core)) is not None:
            raise UsageError(
                f"a step of lanes starts from empty gradients, but {stale} has one; call optimizer.zero_grad() before"
            )
        lanes.step = step
        self.buffers.begin()
        if core.oversight is not None:
            core.oversight.begin(step)
        if self.capsules is not None:
            self.capsules.note_lanes(given, step)
        if self.recording is not None:
            self.recording.begin(step)
        with put_back(self._device):
            for lane, micro in zip(lanes.mine, given, strict=True):
                seed_all(mixed(self._seed, step, lane), self._device)
                lanes.open(lane, hash(_shapes(micro)))
                try:
                    yield micro
                except GeneratorExit:  # the loop was left, perhaps only because zip() ended with its other part
                    if self.capsules is not None:
                        self.capsules.on_lane_left()
                    if lane == lanes.mine[-1] and not lanes.under_way:
                        self._end_lane(micro, lane, step)
                        self._end_step()
                    raise
                self._end_lane(micro, lane, step)
        self._end_step()

    def _end_lane(self, micro: object, lane: int, step: int) -> None:
        lanes = self._core.lanes
        assert lanes is not None
        if lanes.state is LaneState.OPEN:
            raise UsageError(
                f"lane {lane} of step {step} ended without a backward; call loss.backward() once in the loop over "
                f"lanes (earlier ones inside no_sync()), or model.skip_batch()"
            )
        self.buffers.lane_ended(lane)
        if self._core.weighting.last is not Mode.WEIGHTED:
            self._check_shape(micro, lane, step)

    def _end_step(self) -> None:
        if not self._core.dropped:  # else the step leaves no trace
            self.buffers.end(self._core.transport, self._core.settings.timeout_s)

    def _check_shape(self, micro: object, lane: int, step: int) -> None:
        """Lanes count equally, so their micros must be equally large, unless weight() has said how much each counts."""
        shapes = _shapes(micro)
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            raise UsageError(
                f"the micro of lane {lane} in step {step} has tensors of shape {_shown(shapes)}, those before it had "
                f"{_shown(self._shapes)}: lanes count equally, so it would count too much or too little. Use a loader "
                f"with drop_last=True, or run each backward inside model.weight(number of samples)"
            )


def _shapes(micro: object) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(micro))


def _listed(lanes: range) -> str:
    return f"lane {lanes[0]}" if len(lanes) == 1 else f"lanes {lanes[0]} to {lanes[-1]}"


def _shown(shapes: Shapes) -> str:
    return ", ".join(str(list(shape)) for shape in shapes) or "none"
