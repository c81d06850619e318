"""Replicas stay equal: a part of the state is compared in every step, and gradients that are not finite are named."""

import hashlib
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from paceline.agree import Rotation, StartedWord, first_not_finite, heal, locate, start_word
from paceline.agree.capsule import Kind
from paceline.agree.finite import OWN, FiniteCheck, NotFinite
from paceline.agree.homes import homes_in
from paceline.agree.pieces import Piece
from paceline.agree.rotation import Gone, Listed
from paceline.agree.word import word_of
from paceline.blocks import lanes_of, listed
from paceline.collectives.api import Transport
from paceline.collectives.group import Group
from paceline.errors import NoMajority, NotFiniteGradients, UsageError
from paceline.reducer.ledger import StepLedger
from paceline.reducer.oversight import Findings, Verdict
from paceline.reducer.report import StepReport
from paceline.reducer.slot import GradSlot
from paceline.replica.lane_buffers import LaneBuffers

logger = logging.getLogger("paceline")

Named = Sequence[tuple[str, torch.Tensor]]
COMPARED_PER_ROUND = 8  # comparisons on a device within `state_every` steps
_CHOICES = {"drift": ("raise", "heal"), "not_finite": ("keep", "skip", "raise")}


@dataclass(frozen=True, slots=True)
class Agreement:
    """What ranks check of each other in every step, beside the gradients.

    Args:
        state_every: parameters and optimizer state (in lanes also buffers) are compared bit for bit, a part in every
            step and the whole within so many steps. 1: the whole in every step. 0: never. Steps that a CUDA graph
            replays are not compared. Messages and capsules number steps as `model.lanes(micros, step)` does; without
            lanes they count reductions, from 1.
        drift: when they differ, "raise" on every rank, or "heal": overwrite what differs with the values of the
            majority, say so, and go on.
        trust: the rank whose values are taken to heal when there is no majority, as between two ranks.
        not_finite: when a rank's gradients are not finite, "keep" them as torch does; "skip" the step on all ranks:
            gradients are emptied, so that the optimizer changes nothing; or "raise". With GradScaler keep "keep": it
            looks for them and skips such steps by itself, and raises "No inf checks were recorded" where there are no
            gradients left to look at.
        patience: after so many steps in a row that were skipped, raise.
        capsules: a folder for failure capsules. What the step was given is written there when replicas drift, a
            gradient is not finite, or forward or backward raises; `paceline replay FILE` runs it again. All ranks
            have one or none has. Of each kind of finding a process writes the first 8.
        about: more to write into capsules, such as what the model was built from: plain values and tensors.
    """

    state_every: int = 64
    drift: str = "raise"
    trust: int | None = None
    not_finite: str = "keep"
    patience: int = 10
    capsules: str | Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, accepted in _CHOICES.items():
            if (given := getattr(self, name)) not in accepted:
                raise UsageError(
                    f"Agreement({name}={given!r}) is not known; accepted: {', '.join(map(repr, accepted))}"
                )
        for name, least in (("state_every", 0), ("patience", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"Agreement({name}={value!r}): expected a whole number of at least {least}")
        if self.trust is not None and (type(self.trust) is not int or self.trust < 0):
            raise UsageError(f"Agreement(trust={self.trust!r}): expected a rank, or None")

    def describe(self) -> str:
        names = (item.name for item in fields(self) if item.name not in ("capsules", "about"))
        told = [f"{name}={getattr(self, name)!r}" for name in names]
        return ", ".join([*told, f"capsules={'a folder' if self.capsules is not None else None}"])

    def check_trust(self, size: int) -> None:
        if self.trust is not None and 1 < size <= self.trust:  # alone there is nobody to heal from
            raise UsageError(f"Agreement(trust={self.trust}): expected a rank of this world, 0 to {size - 1}")


class Overseer:
    """Carries an `Agreement` out, for one replica."""

    def __init__(
        self,
        agreement: Agreement,
        params: Named,
        group: Group,
        buffers: LaneBuffers | None = None,
        adds: int = 1,
    ) -> None:
        """`buffers`: only in lanes are they meant to be equal on all ranks, when a step begins. `adds`: how many
        gradients are added up, if that is more than one of each rank."""
        agreement.check_trust(group.size)
        self.agreement = agreement
        # Kind, text, ranks, and whether it is about the step before the one that runs.
        self.on_finding: Callable[[Kind, str, Sequence[int], bool], None] | None = None
        self.bad_in: Callable[[int], list[str]] = lambda _: []  # whose gradients a gate has found not to be finite
        self.wide: Callable[[], list[torch.Tensor]] | None = None  # the parameters where others stand in for them
        self._group = group
        self._buffers = buffers
        self._params = params
        self._names = {id(param): name for name, param in params}
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._params_only = False  # ranks hold different optimizer states, as they do where these are sharded
        self._rotation: Rotation | None = None
        self._stale = True  # the list of what there is to compare has to be made anew
        self._signature = 0
        self._compares = bool(agreement.state_every) and not self._transport.alone
        self._step = self._compared = 0
        self._word: StartedWord | None = None
        self._finite = FiniteCheck(max(group.size, adds))
        self.only_adds: Callable[[], bool] = lambda: False  # whether that is all a reduction does with gradients
        self._in_a_row = 0

    @property
    def _transport(self) -> Transport:
        return self._group.transport

    @property
    def looks_at_sums(self) -> bool:
        return self.agreement.not_finite != "keep"

    def compare_no_more(self) -> None:
        self._compares, self._word = False, None

    def note_optimizer(self, optimizer: object, *, local: bool) -> None:
        assert isinstance(optimizer, Optimizer)
        self._compares = self._compares and not local
        if not any(known() is optimizer for known in self._optimizers):
            self._optimizers = [known for known in self._optimizers if known() is not None]
            self._optimizers.append(weakref.ref(optimizer))
            self._stale = True  # its state will be there when the next step begins

    def begin(self, number: int) -> None:
        self._step = number
        if not self._compares or self._is_captured():
            self._word = None
            return
        if self._stale or self._compared % self.agreement.state_every == 0:
            self._renew()
        assert self._rotation is not None
        first, self._compared = self._compared, self._compared + 1
        together = self._parts_at_once()
        if first % together:
            self._word = None
            return
        changing = [] if self._buffers is None else self._buffers.changing()
        try:
            numbers = range(first, first + together)
            part = [piece.flat() for number in numbers for piece in self._rotation.part(number)]
            self._word = start_word([*part, *changing])
        except Gone:  # an optimizer was let go: its part has its turn again when the list was made anew
            self._word = None

    def _parts_at_once(self) -> int:
        """On a device every call costs the host more than the bytes cost the device: several parts are read together,
        in every so many steps."""
        on_device = self._params[0][1].is_cuda and self._buffers is None
        return max(1, self.agreement.state_every // COMPARED_PER_ROUND) if on_device else 1

    def look_at_own(self, parts: Sequence[torch.Tensor]) -> None:
        self._finite.look_at_own(parts)

    def findings(self, sums: Sequence[torch.Tensor], *, on_device: bool) -> Findings:
        # Forgotten here and not when the next step begins: that one may be captured, and pinned memory that is given
        # back during a capture becomes a part of it.
        word, self._word = self._word, None
        state: int | torch.Tensor = 0
        if word is not None:
            state = word.word() if not on_device else word.on_device()
        found: int | torch.Tensor = 0
        if self.looks_at_sums and on_device:  # there sums are looked at before the update: replica/gate.py
            found = self._finite.taken_on_device()
        elif self.looks_at_sums:
            self._finite.look_at_sums(sums, only_added=self.only_adds())
            found = self._finite.taken()
        return Findings(state, 0 if word is None else self._signature, found)

    def judge(self, rows: Sequence[StepReport], slots: Sequence[GradSlot] | None) -> Verdict:
        error = None
        if not all(row.signature for row in rows):
            pass
        elif len({row.signature for row in rows}) > 1:
            self._compare_parameters_only()
        elif len({row.state for row in rows}) > 1:
            error = self._drifted(late=slots is None)
        late = slots is None
        bad = self.bad_in(rows[0].reduction) if late and self.looks_at_sums else []
        # What came late was added after the reports had left. It is equal on all ranks, so all find the same.
        late_bad = slots is not None and self.looks_at_sums and any(row.late for row in rows) and bool(_spoilt(slots))
        if not (bad or late_bad or any(row.not_finite for row in rows)):
            self._in_a_row = 0
            return Verdict(error=error)
        ranks = [rank for rank, row in enumerate(rows) if row.not_finite & OWN]
        who = f"by the batch of {_batches_of(ranks, rows)}" if ranks else "since the sum over all ranks has overflowed"
        what = _first(bad) if slots is None else _first_of_sums(slots)
        step = self._step if not late else rows[0].lane_step if rows[0].lane_weights else rows[0].reduction
        verdict = self._not_finite(f"{what} is not finite in step {step}, {who}", ranks, late=late)
        return verdict if error is None else Verdict(verdict.drops_gradients, error)

    def hear_alone(self, step: int, bad: list[str]) -> None:
        """In a world of one on a device: which gradients were not finite in `step`, whose update was gated."""
        if not bad:
            self._in_a_row = 0
            return
        text = f"{_first(bad)} is not finite in step {step}, by the batch of this rank"
        if (error := self._not_finite(text, [0], late=True).error) is not None:
            raise error

    def _is_captured(self) -> bool:
        """Whether this step goes into a CUDA graph, whose replays run nothing on the host: nothing could be compared,
        and reading a word would end the capture."""
        return any(param.is_cuda for _, param in self._params[:1]) and torch.cuda.is_current_stream_capturing()

    # ---- another set of ranks

    def begin_anew(self) -> None:
        """The group has moved to ranks that have compared nothing yet."""
        self._rotation, self._stale = None, True
        self._compared = self._in_a_row = 0
        self._word = None

    def make_equal(self, ledger: StepLedger) -> None:
        """Ranks that were stopped at different places go on from one state, which some rank really had: everything is
        taken from the lowest rank among those that have completed the most updates and are in the middle of none.

        Never tensor by tensor: a mixture of two steps is a state that no run has been in.
        """
        self._renew()
        rows = self._tell_all([self._signature, ledger.commits, int(ledger.whole)])
        if len({signature for signature, _, _ in rows}) > 1:  # a rank that was replaced has no optimizer state yet
            self._compare_parameters_only()
            self._renew()
        whole = [rank for rank, row in enumerate(rows) if row[2]]
        source = max(whole, key=lambda rank: (rows[rank][1], -rank)) if whole else 0
        assert self._rotation is not None
        pieces = self._rotation.whole()
        if len(set(map(tuple, self._tell_all([word_of([piece.flat() for piece in pieces])])))) > 1:
            self._take_all(pieces, source)
            if self._transport.rank == 0:
                logger.warning(
                    "ranks were stopped at different places of a step, and all go on from the state of rank %d, %s",
                    source,
                    f"after {rows[source][1]} updates" if whole else "though no rank was between two updates",
                )
        ledger.took(rows[source][1])

    def _tell_all(self, numbers: Sequence[int]) -> list[list[int]]:
        told = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        every = torch.empty(self._transport.size, len(numbers), dtype=torch.int64, device="cpu")
        self._group.wait(self._transport.all_gather(every, told), "the comparison of states")
        rows: list[list[int]] = every.tolist()
        return rows

    def _take_all(self, pieces: Sequence[Piece], source: int) -> None:
        for piece in pieces:
            flat = piece.flat().clone()
            self._group.wait(self._transport.broadcast(flat, source), f"the {piece.name} of rank {source}")
            if self._transport.rank != source:
                piece.write(flat)

    # ---- drift

    def _renew(self) -> None:
        params = self._params
        if self.wide is not None:
            params = [(name, value) for (name, _), value in zip(params, self.wide(), strict=True)]
        buffers, optimizers = self._buffers, () if self._params_only else self._optimizers
        noted = [] if buffers is None else [(name, _InLanes(buffers, name, was)) for name, was in buffers.before()]
        state = [pair for known in optimizers for pair in homes_in(known, self._names)]
        named: Listed = [*params, *noted, *sorted(state, key=lambda pair: pair[0])]
        self._stale = False
        if self._rotation is None:
            self._rotation = Rotation(named, max(1, self.agreement.state_every))
        else:
            self._rotation.renew(named)
        told = self._rotation.described().encode()
        self._signature = int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), signed=True)

    def _compare_parameters_only(self) -> None:
        """Ranks that hold different tensors cannot compare them; parameters are the same everywhere, by agreement."""
        if not self._params_only:
            logger.info("ranks hold different optimizer states, so only parameters are compared between them")
        self._params_only = self._stale = True

    def _drifted(self, *, late: bool) -> Exception | None:
        step = self._step
        self._renew()  # a tensor of the optimizer's state may have been replaced since the list was made
        assert self._rotation is not None
        pieces = self._rotation.whole()  # a weight that drifted has often taken its moments along
        drift = locate(pieces, self._transport, step=step, timeout_s=self._group.timeout_s)
        if not drift.tensors:
            logger.warning("digests of the state differed between ranks in step %d, but the state does not", step)
            return None
        self._tell("divergence", drift.text, drift.ranks, late=late)
        if self.agreement.drift == "raise":
            return drift.error()
        try:
            heal(drift, pieces, self._transport, trust=self.agreement.trust, timeout_s=self._group.timeout_s)
        except NoMajority as error:
            return error
        if self._buffers is not None:
            self._buffers.put_back()
        logger.warning("healed: %s", drift.text_of_healed(self.agreement.trust))
        return None

    # ---- not finite

    def _not_finite(self, text: str, ranks: Sequence[int], *, late: bool) -> Verdict:
        self._in_a_row += 1
        self._tell("not-finite", text, ranks, late=late)
        if self.agreement.not_finite == "raise":
            where = "its capsule has it" if self.on_finding else "Agreement(capsules=…) would keep it"
            error = NotFiniteGradients(
                f"{text}; no rank has stepped on it. Look at that batch ({where}), lower the learning rate, or pass "
                f'not_finite="skip" to go on with the next step',
                ranks=ranks,
            )
            return Verdict(True, error)
        if self._in_a_row >= self.agreement.patience:
            error = NotFiniteGradients(
                f"{text}, and so it was in the last {self._in_a_row} steps, which were skipped; lower the learning "
                f"rate, look at the data, or go on from an earlier checkpoint",
                ranks=ranks,
            )
            return Verdict(True, error)
        if self._transport.rank == 0:
            logger.warning("%s: the step is skipped on all ranks", text)
        return Verdict(True)

    def _tell(self, kind: Kind, text: str, ranks: Sequence[int], *, late: bool) -> None:
        if self.on_finding is not None:
            self.on_finding(kind, text, ranks, late)


def _first(bad: Sequence[str]) -> str:
    more = f" and of {len(bad) - 1} more parameters" if len(bad) > 1 else ""
    return f"the gradient of {bad[0]}{more}" if bad else "a gradient"


def _spoilt(slots: Sequence[GradSlot]) -> NotFinite | None:
    return first_not_finite((slot.meta.name, slot.view) for slot in slots if not slot.asleep)


def _first_of_sums(slots: Sequence[GradSlot]) -> str:
    first = _spoilt(slots)
    return "a gradient" if first is None else f"the gradient of {first.name} ({first.how_many} × {first.kind})"


class _InLanes:
    """A buffer as it was when the step began. When its first piece has its turn, it is looked at as a whole."""

    def __init__(self, buffers: LaneBuffers, name: str, value: torch.Tensor) -> None:
        self._buffers = buffers
        self._name = name
        self._value = value

    def __call__(self, begins: bool) -> torch.Tensor:
        if begins and self._name in self._buffers:
            self._value = self._buffers.now(self._name)
        return self._value


def _batches_of(ranks: Sequence[int], rows: Sequence[StepReport]) -> str:
    """The ranks, and the lanes that they ran: `rank 1 (lanes 2 to 3)`."""
    lanes = len(rows[0].lane_weights)
    if not lanes:
        return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
    own = {rank: lanes_of(rank, len(rows), lanes) for rank in ranks}
    return ", ".join(f"rank {rank} ({listed(mine)})" for rank, mine in own.items())
