"""Audits of lanes: does another rank get the same gradients when it computes a lane again?

    the owner keeps its lane's microbatch and gradients ─→ the step is reduced ─→ all ranks are sent the microbatch
    ─→ the auditor's loop runs it once more ─→ digests are compared ─→ only if they differ: a third rank runs it, too

All its messages are sent when the step is reduced, so no rank waits for a step that fails.
"""

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.agree.audit import Audit, Digests, Verdict, audit_of, decide
from paceline.agree.drift import groups_of, ranks_text
from paceline.agree.exact_copy import UnknownKind, pack_exactly, unpack_exactly
from paceline.agree.first_difference import first_difference
from paceline.agree.state_digest import Piece, state_digest
from paceline.collectives.gather import gather_ints
from paceline.collectives.group import Group
from paceline.errors import UsageError, WrongGradients
from paceline.placement import Placement
from paceline.reducer.reducer import Reducer
from paceline.reducer.repeated_lane import AuditedLanes, LaneGrads, RepeatedLane
from paceline.reducer.unreduced import drop_all
from paceline.replica.agreement import Agreement
from paceline.replica.capsules import CapsuleWriter

logger = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class _Packed:
    """A microbatch as bytes, or the reason why there are none."""

    content: bytes = b""
    failure: str = ""

    @classmethod
    def of(cls, microbatch: object, name: str) -> "_Packed":
        try:
            return cls(pack_exactly(microbatch, name))
        except UsageError as error:
            return cls(failure=str(error))


class LaneAudit:
    """The audit of one step."""

    def __init__(
        self,
        audit: Audit,
        agreement: Agreement,
        core: Reducer,
        given: Sequence[object],
        packed: _Packed | None,
        capsules: CapsuleWriter | None,
    ) -> None:
        """`given`: the microbatches of this rank. `packed`: the audited one, on the rank that runs its lane."""
        assert isinstance(core.batch.lanes, AuditedLanes)
        self.audit = audit
        self._capsules = capsules
        self._action = agreement.audit
        self._core = core
        self._lanes = core.batch.lanes
        self._generation = core.group.generation
        self._given = given
        self._packed = packed
        self._repeat: RepeatedLane | None = None
        self._result: LaneGrads | None = None  # of the last repeat
        self._left = False  # the loop of this rank has ended, so no lane can be run in it
        self._what = f"the audit of lane {audit.lane} in step {audit.step}"
        self._lanes.keep(audit.lane if packed is not None else -1)
        self.rounds = self._run()

    @classmethod
    def begin(
        cls,
        agreement: Agreement,
        core: Reducer,
        given: Sequence[object],
        step: int,
        capsules: CapsuleWriter | None,
    ) -> "LaneAudit | None":
        """Step `step` begins, with these microbatches on this rank. Returns its audit, if it has one."""
        lanes, group = core.batch.lanes, core.group
        assert lanes is not None
        audit = audit_of(step, agreement.audit_every, lanes.count, group.size)
        if audit is None:
            return None
        # Now: the loop may change its microbatch in place.
        own = audit.owner == group.rank
        packed = _Packed.of(given[audit.lane - lanes.mine[0]], f"the microbatch of lane {audit.lane}") if own else None
        return cls(audit, agreement, core, given, packed, capsules)

    # ---- what the loop over lanes calls

    @property
    def repeating(self) -> bool:
        """Whether the current lane is the repeated one."""
        return self._repeat is not None

    def begin_repeat(self) -> None:
        self._repeat = RepeatedLane(self._core, self.audit.lane)

    def end_repeat(self) -> None:
        """The body of the loop has finished or was left."""
        if self._repeat is not None:
            self._result, self._repeat = self._repeat.end(), None

    def cancel(self) -> None:
        """The step has no gradients on any rank, so there is nothing to compare."""
        self.leave()
        self.rounds.close()
        self._lanes.keep(-1)

    def leave(self) -> None:
        """The loop was left: no lane can run in it any more."""
        self.end_repeat()
        self._left = True

    def finish(self) -> None:
        """The loop has ended: send what the other ranks wait for, if that has not happened yet. If the group has moved
        to other ranks meanwhile, no rank waits."""
        if self._core.group.generation != self._generation:
            self.cancel()
            return
        self.leave()
        for _ in self.rounds:
            raise AssertionError("a lane cannot be repeated in a loop that was left")

    # ---- the phases, which all ranks go through

    def _run(self) -> Generator[Any]:
        """Yields the microbatch that the loop must run now. All ranks run it to its end."""
        try:
            blob = self._exchange()
            core, audit = self._core, self.audit
            if self._packed is not None:
                mine: LaneGrads | None = self._lanes.kept or None
            else:
                mine = yield from self._repeated(blob, (audit.auditor,))
            first = self._gather(mine)
            if len(first) == 2 and len(set(first.values())) == 2:
                again = self._gather((yield from self._repeated(blob, audit.deciders)))
                self._conclude(decide(audit, first, again), mine)
            elif len(first) < 2 and core.group.rank == audit.auditor:
                logger.warning(
                    "lane %d of step %d was not audited: %s could not repeat it, because its loop over lanes "
                    "ended early, its own microbatches are of another kind, an optimizer has stepped in it, or its "
                    "backward failed",
                    audit.lane,
                    audit.step,
                    ranks_text([audit.auditor]),
                )
        finally:
            self._lanes.keep(-1)

    def _repeated(self, blob: torch.Tensor, ranks: Sequence[int]) -> Generator[Any, None, LaneGrads | None]:
        """Repeat the lane, if this rank is one of `ranks`. Returns its gradients."""
        self._result = None
        stepped = self._core.optimizes_in_backward or not self._core.step_state.reductions_since_step
        if self._core.group.rank in ranks and not self._left and not stepped:
            try:
                microbatch = unpack_exactly(blob, self._core.device, like=self._given)
            except UnknownKind as error:
                logger.warning("%s: the microbatch cannot be rebuilt here: %s", self._what, error)
            else:
                yield microbatch
        return self._result

    def _exchange(self) -> torch.Tensor:
        """The microbatch of the owner, on all ranks: any of them may have to run the lane."""
        group, packed = self._core.group, self._packed or _Packed()
        content = packed.failure.encode() or packed.content
        ((size, failed), *_) = gather_ints(group, [len(content), bool(packed.failure)], self._what)[self.audit.owner :]
        blob = torch.zeros(size, dtype=torch.uint8, device="cpu")
        if group.rank == self.audit.owner:
            blob.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        group.wait(group.transport.broadcast(blob, self.audit.owner), self._what)
        if failed:
            self._drop_step()
            raise UsageError(f"Agreement(audit_every=): {bytes(blob.tolist()).decode()}")
        return blob

    def _gather(self, grads: LaneGrads | None) -> Digests:
        """The digests of the ranks that have computed the lane. All ranks call it."""
        own = [0, 0] if grads is None else [1, state_digest([piece.flat() for piece in self._pieces(grads)])]
        rows = gather_ints(self._core.group, own, self._what)
        return {rank: digest for rank, (computed, digest) in enumerate(rows) if computed}

    def _pieces(self, grads: LaneGrads | None) -> list[Piece]:
        """The gradients of the lane, a piece for each parameter. Without them, arbitrary contents of the buckets."""
        found = []
        for slot in self._core.bucket_set.slots:
            if not slot.owned_elsewhere:
                flat = slot.bucket.flat if grads is None else grads[slot.bucket.spec.index]
                view = slot.meta.view_of(flat, slot.offset)
                found.append(Piece(slot.meta.name, view, 0, view.numel()))
        return found

    # ---- what follows when they differ

    def _conclude(self, verdict: Verdict, mine: LaneGrads | None) -> None:
        audit, group = self.audit, self._core.group
        pair = (audit.owner, audit.auditor)
        name, element = first_difference(self._pieces(mine), group, pair, self._what)
        where = f"lane {audit.lane} of step {audit.step}"
        sentences = [f"For {where} {ranks_text(sorted(pair))} got different gradients, first in {name}"]
        if element is not None:
            sentences.append(element.text([[rank] for rank in pair]))
        sentences.append(f"{verdict.how[0].upper()}{verdict.how[1:]}")
        if verdict.known:
            who = ranks_text(verdict.ranks)
            sentences.insert(0, f"{who} computes wrong results")
            sentences.append(self._about_state(verdict.ranks))
            sentences.append(
                f"Take the machine of {who} out of the job and test its processor and memory; what was trained since "
                f"the last successful audit of {who} may be wrong"
            )
        text = ". ".join(sentences)
        if self._capsules is not None:
            self._capsules.on_finding("divergence", text, verdict.ranks)
        if self._action == "warn":
            if group.rank == 0:
                logger.warning("%s", text)
            return
        self._drop_step()
        raise WrongGradients(
            text, ranks=verdict.ranks, known=verdict.known, step=audit.step, lane=audit.lane, tensor=name
        )

    def _about_state(self, wrong: Sequence[int]) -> str:
        """Whether the parameters from which they were computed were equal. All ranks call it."""
        params = [slot.param.detach() for slot in self._core.bucket_set.slots]
        digests = [digest for (digest,) in gather_ints(self._core.group, [state_digest(params)], self._what)]
        odd = [rank for group in groups_of(digests)[1:] for rank in group]
        if set(odd).isdisjoint(wrong):
            return "Its parameters equal those of the other ranks, so the computation itself was wrong"
        return (
            "Its parameters differ from those of the other ranks, so it may have computed correctly with wrong values"
        )

    def _drop_step(self) -> None:
        """Discard this step: no rank uses its gradients, and nothing else of it remains."""
        with self._core.lock, torch.no_grad():
            drop_all(self._core.bucket_set)
            self._core.step_state.discarded()


def check_audits(agreement: Agreement | None, lanes: int | None, placement: Placement, group: Group) -> None:
    """Refuse impossible audits."""
    if agreement is None or not agreement.audit_every:
        return
    if lanes is None:
        raise UsageError(
            f"Agreement(audit_every={agreement.audit_every}) needs lanes=, whose results are the same on every rank "
            f"that computes them"
        )
    if placement.shards_parameters and not group.single:
        raise UsageError(
            f'Agreement(audit_every={agreement.audit_every}) cannot be combined with placement="zero3", where one rank '
            f'alone cannot run a lane: parameters are gathered by all; use placement="zero2"'
        )
