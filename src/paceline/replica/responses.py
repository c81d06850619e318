"""Responses to findings of the ranks: drift is healed or raised, non-finite gradients are skipped or raised."""

import logging
from collections.abc import Callable, Sequence

from paceline.agree.capsule import Kind
from paceline.agree.drift import SEARCH, Drift, heal, locate, ranks_text
from paceline.agree.finite import OWN, NotFinite, first_not_finite
from paceline.agree.state_digest import Piece
from paceline.blocks import lanes_of, listed
from paceline.collectives.gather import gather_unless_equal
from paceline.collectives.group import Group
from paceline.errors import NoMajority, NotFiniteGradients, ReplicaDrift
from paceline.reducer.bucket import GradSlot
from paceline.reducer.report import StepReport
from paceline.reducer.step_observer import Decision
from paceline.replica.agreement import Agreement

logger = logging.getLogger("paceline")


# Writes a capsule. It is called with the kind, the text and the ranks of a finding, and whether it concerns the
# previous step. Returns False if no capsules are kept.
Report = Callable[[Kind, str, Sequence[int], bool], bool]


def resolve_drift(
    states: Sequence[tuple[Sequence[Piece], Group]],
    group: Group,
    agreement: Agreement,
    step: int,
    report: Report,
    *,
    late: bool,
) -> tuple[Exception | None, bool]:
    """Find what differs between the ranks of `group`, and heal it if requested. `states`: the compared state,
    and its group. Returns the error to raise, and whether something was healed."""
    if len(states) > 1 or states[0][1] is not group:
        return _resolve_in_groups(states, group, agreement, step, report, late=late)
    pieces, _ = states[0]
    drift = locate(pieces, group, step=step)
    if not drift.tensors:
        logger.warning(
            "ranks reported different digests of their state at step %d, but all %d tensors are equal now: a digest "
            "was computed wrongly or changed in transit. Continue, and if it happens again, test the memory and the "
            "processor of the machines",
            step,
            drift.compared,
        )
        return None, False
    report("divergence", drift.text, drift.ranks, late)
    if agreement.drift == "raise":
        return drift.error(), False
    try:
        heal(drift, pieces, group, trust=agreement.trust)
    except NoMajority as error:
        return error, False
    logger.warning("healed: %s", drift.text_of_healed(agreement.trust))
    return None, True


def _resolve_in_groups(
    states: Sequence[tuple[Sequence[Piece], Group]],
    world: Group,
    agreement: Agreement,
    step: int,
    report: Report,
    *,
    late: bool,
) -> tuple[Exception | None, bool]:
    """The same if twins compare shards: findings of some twins become an error on all ranks of `world`, or are
    healed by those that hold the shard."""
    drifts: list[Drift] = []
    failed: ReplicaDrift | None = None
    try:
        drifts += [locate(pieces, group, step=step) for pieces, group in states]
    except ReplicaDrift as error:
        failed = error
    first = failed or next((drift.error() for drift in drifts if drift.tensors), None)
    told = _tell(first, world)
    if told is None:
        logger.warning("ranks reported different digests of their state at step %d, but all of it is equal now", step)
        return None, False
    report("divergence", str(told), told.ranks, late)
    if agreement.drift == "raise":
        return first or told, False
    for (pieces, group), drift in zip(states, drifts, strict=failed is None):
        # Among twins, the one in the shard group of the trusted rank.
        trust = None if agreement.trust is None else agreement.trust // (world.size // group.size)
        try:
            if drift.tensors:
                heal(drift, pieces, group, trust=trust)
                logger.warning("healed: %s", drift.text_of_healed(agreement.trust))
        except ReplicaDrift as error:
            failed = failed or error
    told = _tell(failed, world)
    return failed or told, told is None


def _tell(error: ReplicaDrift | None, world: Group) -> ReplicaDrift | None:
    """The error of the first rank that has one, on all ranks."""
    own = None if error is None else [str(error), list(error.ranks), error.known, error.tensor, error.step]
    told = gather_unless_equal(world, own, SEARCH) or [own]
    found = next((one for one in told if one is not None), None)
    if found is None:
        return None
    text, ranks, known, tensor, step = found
    return ReplicaDrift(text, ranks=ranks, known=known, tensor=tensor, step=step)


class NonFiniteSteps:
    """Decides about the steps of one replica, and counts those in a row that were skipped."""

    def __init__(self, agreement: Agreement, group: Group, report: Report) -> None:
        self._agreement = agreement
        self._group = group
        self._report = report
        self.in_a_row = 0

    def decide(
        self, rows: Sequence[StepReport], slots: Sequence[GradSlot] | None, bad: Sequence[str], step: int
    ) -> Decision:
        """Decide from the reports of all ranks. `slots`: None if their step is over, in which the gradients of the
        parameters `bad` were not finite; else the reduced gradients of step `step`."""
        late = slots is None
        # Late gradients were added after the reports were sent. They are equal on all ranks, so all find the same.
        late_bad = slots is not None and any(row.late for row in rows) and _first_in(slots) is not None
        if not (bad or late_bad or any(row.not_finite for row in rows)):
            self.in_a_row = 0
            return Decision()
        ranks = [rank for rank, row in enumerate(rows) if row.not_finite & OWN]
        who = (
            f"caused by the batch of {_batches_of(ranks, rows)}"
            if ranks
            else "because the sum over all ranks overflowed"
        )
        what = _one_of(bad) if slots is None else _one_of_sums(slots)
        if late:
            step = rows[0].lane_step if rows[0].lane_weights else rows[0].reduction
        return self._decide(f"{what} is not finite in step {step}, {who}", ranks, late=late)

    def decide_alone(self, step: int, bad: Sequence[str]) -> None:
        """In a world of one on a device: these gradients were not finite in `step`, whose update was gated."""
        if not bad:
            self.in_a_row = 0
            return
        text = f"{_one_of(bad)} is not finite in step {step}, caused by the batch of this rank"
        if (error := self._decide(text, [0], late=True).error) is not None:
            raise error

    def _decide(self, text: str, ranks: Sequence[int], *, late: bool) -> Decision:
        self.in_a_row += 1
        kept = self._report("not-finite", text, ranks, late)
        if self._agreement.not_finite == "raise":
            where = "it is in the capsule" if kept else "Agreement(capsules=…) would save it"
            error = NotFiniteGradients(
                f"{text}; no rank has stepped on it. Look at that batch ({where}), lower the learning rate, or pass "
                f'not_finite="skip" to continue with the next step',
                ranks=ranks,
            )
            return Decision(True, error)
        if self.in_a_row >= self._agreement.patience:
            error = NotFiniteGradients(
                f"{text}, as it was in each of the last {self.in_a_row} steps, which were skipped; lower the learning "
                f"rate, look at the data, or continue from an earlier checkpoint",
                ranks=ranks,
            )
            return Decision(True, error)
        if self._group.rank == 0:
            logger.warning("%s: the step is skipped on all ranks", text)
        return Decision(True)


def _one_of(bad: Sequence[str]) -> str:
    more = f" and of {len(bad) - 1} more parameters" if len(bad) > 1 else ""
    return f"the gradient of {bad[0]}{more}" if bad else "a gradient"


def _one_of_sums(slots: Sequence[GradSlot]) -> str:
    first = _first_in(slots)
    return "a gradient" if first is None else f"the gradient of {first.name} ({first.how_many} × {first.kind})"


def _first_in(slots: Sequence[GradSlot]) -> NotFinite | None:
    return first_not_finite((slot.meta.name, slot.view) for slot in slots if not slot.owned_elsewhere)


def _batches_of(ranks: Sequence[int], rows: Sequence[StepReport]) -> str:
    """The ranks, and the lanes that they ran: `rank 1 (lanes 2 to 3)`."""
    lanes = len(rows[0].lane_weights)
    if not lanes:
        return ranks_text(ranks)
    own = {rank: lanes_of(rank, len(rows), lanes) for rank in ranks}
    return ", ".join(f"rank {rank} ({listed(mine)})" for rank, mine in own.items())
