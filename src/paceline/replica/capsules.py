"""Failure capsules: one file that holds a step that went wrong, so that it can be run again elsewhere.

On a finding that all ranks share (drift, gradients that are not finite) the batches of all of them are gathered, and
the first rank at fault writes. When one rank crashes, it writes what it has itself.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.agree.capsule import Capsule, Kind, capsule_bytes, capsule_from, write_capsule
from paceline.agree.word import word_of
from paceline.collectives.api import Transport
from paceline.collectives.wait import finish
from paceline.kernels import kernel_settings
from paceline.randomness import rng_state
from paceline.reducer.reducer import Reducer
from paceline.replica.agreement import Agreement
from paceline.replica.lane_buffers import COMPARED_BYTES, LaneBuffers

logger = logging.getLogger("paceline")

KEPT_STAMPS = 64
GATHERED_BYTES = 1 << 30  # batches of all ranks are put together up to this size


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
        self._batch: Any = None
        self._found: dict[str, torch.Tensor] = {}  # buffers before the forward, which may change them
        self._rng: dict[str, Any] | None = None

    def note_lanes(self, micros: Sequence[Any], step: int) -> None:
        """A step of lanes begins. Its random numbers follow from the seed."""
        self._step, self._batch, self._rng = step, list(micros), None

    def note_forward(self, inputs: Any, kwargs: Any) -> None:
        """A forward outside lanes begins."""
        self._step = self._core.reductions + 1  # the one that this forward leads to
        self._batch, self._rng = {"args": tuple(inputs), "kwargs": dict(kwargs)}, rng_state(self._device)
        small = ((name, b) for name, b in self._module.named_buffers() if b.nbytes <= COMPARED_BYTES)
        self._found = {name: buffer.detach().clone() for name, buffer in small}

    def on_finding(self, kind: Kind, text: str, ranks: Sequence[int]) -> None:
        """All ranks call it, in the same step."""
        transport = self._core.transport
        own = self._own(kind, text, ranks)
        if kind == "divergence":
            words = {name: word_of([value]) for name, value in self._state().items()}
            own = replace(own, settings={**own.settings, "words": words})
        gathered = _gather(capsule_bytes(own), transport, self._core.settings.timeout_s)
        if transport.rank != (ranks[0] if ranks else 0):
            return
        parts = [capsule_from(raw) for raw in gathered or []]
        others = tuple(
            {"rank": p.rank, "lanes": p.lanes, "batch": p.batch, "rng": p.rng} for p in parts if p.rank != own.rank
        )
        capsule = replace(self._own(kind, text, ranks, state=True), others=others)
        if kind == "divergence" and parts:
            by_tensor = {name: [p.settings["words"][name] for p in parts] for name in parts[0].settings["words"]}
            capsule = replace(capsule, settings={**capsule.settings, "words": by_tensor})
        self._write(capsule)

    def on_crash(self, error: BaseException) -> None:
        """This rank is about to end."""
        if self._batch is not None:
            text = f"{type(error).__name__}: {error}"
            self._write(self._own("crash", text, [self._core.transport.rank], state=True))

    def _own(self, kind: Kind, text: str, ranks: Sequence[int], *, state: bool = False) -> Capsule:
        core = self._core
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
            rng=self._rng,
            batch=self._batch,
            state=self._state() if state else {},
            collectives=tuple(
                f"{stamp.moment.value} of backward {stamp.backward}"
                + (f", bucket {stamp.bucket}" * (stamp.bucket >= 0))
                for stamp in core.trace.stamps()[-KEPT_STAMPS:]
            ),
        )

    def _state(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers as the step found them."""
        before = self._found if self._buffers is None else dict(self._buffers.before())
        return {name: before.get(name, value) for name, value in self._module.state_dict().items()}

    def _write(self, capsule: Capsule) -> None:
        path = self._folder / f"step-{capsule.step:08d}-{capsule.kind}-rank-{capsule.rank}.capsule"
        try:
            write_capsule(path, capsule)
        except OSError as error:  # the failure itself is what has to be told
            logger.warning("the failure capsule %s could not be written: %s", path, error)
        else:
            logger.warning("what went wrong is in %s; run it again with: paceline replay %s", path, path)


def _gather(raw: bytes, transport: Transport, timeout_s: float | None) -> list[bytes] | None:
    """The bytes of all ranks, or None if they are too many."""
    lengths = torch.empty(transport.size, dtype=torch.int64)
    work = transport.all_gather(lengths, torch.tensor([len(raw)], dtype=torch.int64))
    finish(work, what="the sizes of capsules", watch=transport.watch, timeout_s=timeout_s)
    longest = int(lengths.max())
    if longest * transport.size > GATHERED_BYTES:
        return None
    padded = torch.frombuffer(bytearray(raw.ljust(longest, b"\0")), dtype=torch.uint8)
    gathered = torch.empty(transport.size, longest, dtype=torch.uint8)
    work = transport.all_gather(gathered.view(-1), padded)
    finish(work, what="the batches of all ranks", watch=transport.watch, timeout_s=timeout_s)
    return [row[:length].numpy().tobytes() for row, length in zip(gathered, lengths.tolist(), strict=True)]
