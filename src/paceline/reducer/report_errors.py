"""The errors that all ranks raise alike after reading the reports; each names ranks and parameters."""

import logging
from collections.abc import Sequence

from paceline.errors import BackwardAborted, CollectiveMismatch, GraphChanged, UnusedParameters, UsageError
from paceline.reducer.bucket import GradSlot
from paceline.reducer.report import Abort, Mode, StepReport
from paceline.reducer.used_params import BITS

logger = logging.getLogger("paceline")


def explain_mismatch(rows: Sequence[StepReport]) -> None:
    """Raise, on every rank alike, if the reports of the ranks are inconsistent. Warn of what is only suspicious."""
    if any(row.abort is not Abort.NO for row in rows):
        return
    counts = [row.reduction for row in rows]
    if len(set(counts)) > 1:
        raise CollectiveMismatch(
            f"ranks reduced gradients of different steps: {_by_rank(counts)} reductions so far; run the same number of "
            f"backward passes, and the same no_sync() blocks, on every rank"
        )
    digests = [f"{row.launch_digest:x}" for row in rows]
    if len(set(digests)) > 1:
        raise CollectiveMismatch(
            f"internal error: bucket schedules diverged between ranks ({_by_rank(digests)}), so "
            f"gradients of different parameters may have been added up; please report this"
        )
    if len({row.owned_elsewhere for row in rows}) > 1:
        raise CollectiveMismatch(
            "replicas share parameters, which the one that was called last reduces, and ranks have called them in "
            "different orders, so their gradients do not belong together; call these replicas in one order on all ranks"
        )
    _check_lanes(rows)
    modes = {row.mode for row in rows}
    if Mode.MIXED in modes or {Mode.PLAIN, Mode.WEIGHTED} <= modes:
        raise CollectiveMismatch(
            f"some backwards of this step ran inside weight() and some outside ({_by_rank([r.mode.name for r in rows])}"
            f"); put every microbatch of a step, on every rank, inside weight()"
        )
    _warn_of_uneven_microbatches(rows)


def _check_lanes(rows: Sequence[StepReport]) -> None:
    steps = [row.lane_step for row in rows]
    if len(set(steps)) > 1:
        raise CollectiveMismatch(
            f"ranks run lanes of different steps ({_by_rank(steps)}), so their random numbers do not belong together; "
            f"give model.lanes(microbatches, step) the same step on every rank"
        )


def _warn_of_uneven_microbatches(rows: Sequence[StepReport]) -> None:
    microbatches = [row.microbatches for row in rows]
    if rows[0].mode is Mode.PLAIN and len({count for count in microbatches if count}) > 1:
        logger.warning(
            "ranks ran different numbers of backwards for one reduction (%s), so their batches weigh differently in "
            "the mean; use the same no_sync() blocks on every rank, or weight()",
            _by_rank(microbatches),
        )


def aborted_error(rows: Sequence[StepReport], consequence: str = "") -> BackwardAborted:
    """The error on all ranks if one had no gradients. `consequence`: the outcome of the step, if it is over."""
    ranks = [rank for rank, row in enumerate(rows) if row.abort is not Abort.NO]
    listed = ", ".join(str(rank) for rank in ranks)
    threads = any(row.abort is Abort.THREADS for row in rows)
    why = "met a second backward of the same replica, on another thread," if threads else "ended with an exception"
    advice = "run the backwards of a replica one after another" if threads else "see that rank's own error"
    then = consequence or "so there are no gradients for this step on any rank"
    return BackwardAborted(
        f"the backward {why} on rank {listed}, {then}; {advice}, then skip the step or stop on all ranks", ranks=ranks
    )


def skipped_error(rows: Sequence[StepReport], step: str) -> CollectiveMismatch:
    """The error if a rank called skip_batch() and the others could not learn of it in time."""
    listed = ", ".join(str(rank) for rank, row in enumerate(rows) if row.skipped)
    return CollectiveMismatch(
        f"rank {listed} called skip_batch() in {step}, but without weights the others learn of it too late on this "
        f"transport: their last update divided by the number of all ranks; run every backward inside model.weight(n)"
    )


def graph_error(rows: Sequence[StepReport]) -> GraphChanged:
    """The error on ranks whose own graph is unchanged."""
    listed = ", ".join(str(rank) for rank, row in enumerate(rows) if row.graph_changed)
    return GraphChanged(
        f"Your training graph has changed in this iteration on rank {listed}, which is not compatible with "
        f"static_graph=True; see that rank's own error for the parameters"
    )


def _by_rank(values: Sequence[object]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))


def unused_error(slots: Sequence[GradSlot], rows: Sequence[StepReport]) -> UnusedParameters:
    """The same error for every rank: which parameters took no part, and where."""
    lines = []
    for index, slot in enumerate(slots):
        ranks = [rank for rank, row in enumerate(rows) if not row.used[index // BITS] >> index % BITS & 1]
        if ranks:
            lines.append(f"  {slot.meta.name}: {_where(ranks, len(rows))}")
    return _unused(lines, "the backward")


def unused_in_lanes(slots: Sequence[GradSlot], uses: Sequence[int]) -> UnusedParameters | None:
    """The error for every rank, if there are parameters that no lane of this step has used."""
    lines = [f"  {slot.meta.name}: unused in all lanes" for slot in slots if not uses[slot.index]]
    return _unused(lines, "any lane of this step") if lines else None


def _unused(lines: Sequence[str], where: str) -> UnusedParameters:
    return UnusedParameters(
        f'unused="error" is set, and these parameters took no part in {where}:\n'
        + "\n".join(lines)
        + '\nUse them in the loss, freeze them (requires_grad_(False)) before wrapping, or pass unused="zero".'
    )


def _where(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size:
        return "unused on all ranks"
    if len(ranks) == 1:
        return f"unused on rank {ranks[0]} only"
    return "unused on ranks " + ", ".join(str(rank) for rank in ranks)


def late_on_device(rows: Sequence[StepReport], step: str) -> UsageError:
    """The same error for every rank: on a device the second round for late gradients would make hosts wait."""
    listed = ", ".join(str(rank) for rank, row in enumerate(rows) if row.late)
    return UsageError(
        f"on rank {listed} a parameter got a second gradient in one backward after its bucket had been sent ({step}), "
        f"as with reentrant checkpointing, and it was not reduced; use checkpoint(..., use_reentrant=False)"
    )


def late_gradient(slots: Sequence[GradSlot]) -> UsageError:
    """The same error for every rank, although only the ranks where it happened know the parameter."""
    names = ", ".join(slot.meta.name for slot in slots if slot.late) or "a parameter of another rank"
    return UsageError(
        f"{names} got a second gradient in one backward after its bucket had been sent, as with reentrant "
        f"checkpointing: in lanes its place in the sum would depend on the number of ranks; use checkpoint(..., "
        f"use_reentrant=False)"
    )
