"""Do replicas stay equal, and are gradients finite? Checked by the reports that ranks exchange in every step."""

from collections.abc import Callable, Sequence

import torch
from torch.optim.optimizer import Optimizer

from paceline.agree.capsule import Kind
from paceline.agree.finite import FiniteCheck
from paceline.agree.state_digest import PendingDigest, StateReplaced, start_digest
from paceline.collectives.group import Group
from paceline.reducer.bucket import GradSlot
from paceline.reducer.report import StepReport
from paceline.reducer.step_observer import Decision, Findings
from paceline.replica.agreement import Agreement
from paceline.replica.compared_state import ComparedState
from paceline.replica.responses import NonFiniteSteps, resolve_drift

COMPARED_PER_ROUND = 8  # comparisons on a device within `state_every` steps


class ReplicaMonitor:
    """Carries out an `Agreement` for one replica.

    When a step begins, the digest of a part of the state is started; it is sent in the step report, and when the
    reports of all ranks have arrived, all of them decide alike.
    """

    def __init__(
        self,
        agreement: Agreement,
        group: Group,
        state: ComparedState,
        *,
        adds: int,
        only_adds: Callable[[], bool],
        bad_in: Callable[[int], list[str]],
        on_finding: Callable[[Kind, str, Sequence[int], bool], None] | None,
    ) -> None:
        """`adds`: how many gradients are added up, if more than one per rank. `only_adds`: whether the reduction
        does nothing else. `bad_in`: the non-finite gradients that a gate has found in a reduction. `on_finding` is
        called with the kind, the text, the ranks, and whether it concerns the previous step."""
        agreement.check_trust(group.size)
        self.agreement = agreement
        self.group = group
        self.looks_at_sums = agreement.not_finite != "keep"
        self.state = state
        self.on_finding = on_finding
        self._only_adds = only_adds
        self._bad_in = bad_in
        self._compares = bool(agreement.state_every) and not group.single
        self._step = self._compared = self._signature = 0
        self._digest: PendingDigest | None = None
        self._adds = adds
        self._finite = FiniteCheck(max(group.size, adds))
        self.non_finite = NonFiniteSteps(agreement, group, self._report)

    def stop_comparing(self) -> None:
        self._compares, self._digest = False, None

    def note_optimizer(self, optimizer: object, *, local: bool) -> None:
        assert isinstance(optimizer, Optimizer)
        self._compares = self._compares and not local
        if not any(known() is optimizer for known in self.state.optimizers):
            self.state.add_optimizer(optimizer)

    # ---- one step

    def begin(self, number: int) -> None:
        self._step, self._digest = number, None
        if not self._compares or self._is_captured():
            return
        state, every = self.state, self.agreement.state_every
        if state.stale or self._compared % every == 0:
            state.list_anew()
        first, turn = divmod(self._compared, state.turns)
        compared = state.twins if state.twins is not None and (turn or state.twins.instead) else state
        self._signature, self._compared = compared.signature, self._compared + 1
        # On a device every call costs the host more than the bytes cost the device: several parts are read together.
        on_device = state.on_device and state.buffers is None
        together = max(1, every // COMPARED_PER_ROUND) if on_device else 1
        if first % together:
            return
        changing = [] if state.buffers is None or compared is not state else state.buffers.changing()
        try:
            parts = [piece.flat() for n in range(first, first + together) for piece in compared.rotation.part(n)]
        except StateReplaced:  # an optimizer was released: the state is listed again before its part is compared
            return
        self._digest = start_digest([*parts, *changing])

    def _is_captured(self) -> bool:
        """Whether this step goes into a CUDA graph, whose replays run nothing on the host: nothing could be compared,
        and reading a digest would end the capture."""
        return self.state.on_device and torch.cuda.is_current_stream_capturing()

    def look_at_own(self, parts: Sequence[torch.Tensor]) -> None:
        self._finite.look_at_own(parts)

    def findings(self, sums: Sequence[torch.Tensor], *, on_device: bool) -> Findings:
        # Released here and not when the next step begins: that one may be captured, and pinned memory that is freed
        # during a capture becomes a part of it.
        digest, self._digest = self._digest, None
        state: int | torch.Tensor = 0
        if digest is not None:
            state = digest.value() if not on_device else digest.on_device()
        found: int | torch.Tensor = 0
        if self.looks_at_sums and on_device:  # there sums are checked before the update: replica/gate.py
            found = self._finite.taken_on_device()
        elif self.looks_at_sums:
            self._finite.look_at_sums(sums, only_added=self._only_adds())
            found = self._finite.taken()
        return Findings(state, 0 if digest is None else self._signature, found)

    def decide(self, rows: Sequence[StepReport], slots: Sequence[GradSlot] | None) -> Decision:
        error = None
        if len({(row.signature, row.state) for row in rows}) > 1 and self.state.differs(rows):
            error = self._resolve_drift(late=slots is None)
        if not self.looks_at_sums:
            return Decision(error=error)
        bad = self._bad_in(rows[0].reduction) if slots is None else []
        decision = self.non_finite.decide(rows, slots, bad, self._step)
        return decision if error is None else Decision(decision.drops_gradients, error)

    def begin_anew(self) -> None:
        """The group has moved to ranks that have not compared anything yet."""
        self.state.stale = True
        self._compared = self.non_finite.in_a_row = 0
        self._digest, self._finite = None, FiniteCheck(max(self.group.size, self._adds))

    # ---- findings

    def _resolve_drift(self, *, late: bool) -> Exception | None:
        states = self.state.by_group(self.group)  # all of it: if a weight has drifted, so have its moments, often
        error, healed = resolve_drift(states, self.group, self.agreement, self._step, self._report, late=late)
        if healed and self.state.buffers is not None:
            self.state.buffers.put_back()
        return error

    def _report(self, kind: Kind, text: str, ranks: Sequence[int], late: bool) -> bool:
        """Write a capsule. Returns False if none is kept."""
        if self.on_finding is not None:
            self.on_finding(kind, text, ranks, late)
        return self.on_finding is not None
