"""What a rank reports, and what follows from the reports of all ranks: at once, or one reduction later.

Where streams order collectives, the reports of a reduction are read at the end of the next one, on every rank: so no
host waits for what its device has just been given, and all ranks decide alike. Until buckets are planned, inside
join(), and on a host, which waits for the sums anyway, they are read at once.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from paceline.collectives.wait import FutureWork
from paceline.errors import PacelineError
from paceline.reducer import lane_shapes, report
from paceline.reducer.exchange import PendingReports, known_on_device, send_from_host
from paceline.reducer.lanes import late_gradient
from paceline.reducer.oversight import Findings
from paceline.reducer.report import Abort, Mode, StepReport, Vote
from paceline.reducer.settle import hand_back, settle, settle_on_device, uses_of
from paceline.reducer.turn import Part

if TYPE_CHECKING:
    from paceline.reducer.reducer import Reducer


def send_report(reducer: "Reducer") -> None:
    """Tell the other ranks what this one has to tell. A step that goes into a CUDA graph tells nothing: its replays
    would tell the same again."""
    on_device = reducer.ordered_by_streams
    if on_device and torch.cuda.is_current_stream_capturing():
        return
    sums = [bucket.flat for bucket in reducer.set.buckets if not bucket.skipped]
    found = Findings() if reducer.oversight is None else reducer.oversight.findings(sums, on_device=on_device)
    turn = reducer.turn
    told = turn.report(reducer, found)
    if on_device:
        known = known_on_device(found.state, found.not_finite)
        turn.sent = reducer.device_reports.send(told, reducer.transport, known)
        turn.sent.computed = turn.computed
        reducer.watcher.watch(turn.sent)
    else:
        turn.sent = send_from_host(told, reducer.transport)
    turn.sent.graph_error = turn.graph_error
    reducer.votes = Vote.NOTHING


def hear(reducer: "Reducer") -> Exception | None:
    """All buckets are reduced: read the reports that are due, and give the gradients back.

    Returns the error to raise, the same on every rank, once everything is in its place again.
    """
    mine = reducer.turn.sent
    if mine is None:
        return hear_later(reducer, None)
    reducer.unheard.append(mine)
    error: Exception | None = None
    later = reducer.ordered_by_streams and reducer.planning.settled and reducer.sync_in_join is None
    while len(reducer.unheard) > later:
        found = reducer.unheard.popleft()
        reducer.wait(found.work, found.what)
        rows = found.rows()
        error = error or (hear_now(reducer, rows) if found is mine else heard_late(reducer, rows, found))
    return (hear_later(reducer, mine) if later else None) or error


def hear_now(reducer: "Reducer", rows: Sequence[StepReport]) -> Exception | None:
    """Apply what the ranks told each other of this reduction, and give the gradients back."""
    report.check_together(rows)
    if reducer.lanes is not None:
        lane_shapes.check(rows, reducer.lanes, reducer.group)
    if reducer.on_finished is not None:
        reducer.on_finished()
    if any(row.abort is not Abort.NO for row in rows):
        reducer.set.drop_late()
        if reducer.turn.part is Part.ABORTED:
            return None
        error = report.aborted_error(rows)
        if any(row.abort is Abort.THREADS for row in rows):
            # This rank may have a second backward to come, and that one had two at once. Not `error` itself: once it is
            # raised it holds the graph, which holds the replica, in a cycle that Python's collector does not see.
            reducer.refused = partial(report.aborted_error, rows)
        return error
    reducer.heard = [row.votes for row in rows]
    settled = settle(rows, reducer.set, reducer.group, reducer.weighting, reducer.division(), reducer.settings)
    reducer.uses, problem, dropped = settled.uses, settled.error, False
    if reducer.oversight is not None:
        verdict = reducer.oversight.judge(rows, reducer.set.slots)
        dropped, problem = verdict.drops_gradients, verdict.error or problem
        if dropped:
            reducer.uses = [0] * len(reducer.set.slots)
    _give_back(reducer)
    if not reducer.planning.over and rows[0].ready and not any(row.several for row in rows):
        reducer.planning.after_reduction(reducer.set, reducer.ready_order)
    wait_for_buffer_hooks(reducer)
    if any(row.graph_changed for row in rows):
        problem = problem or reducer.turn.graph_error or report.graph_error(rows)
    reducer.dropped = dropped or problem is not None
    return problem


def hear_later(reducer: "Reducer", mine: PendingReports | None) -> Exception | None:
    """The reports will be read at the end of the next reduction: give the gradients back.

    What has to be known now is taken from the reports as they are on the device. Only a rank that did not use all of
    its parameters waits: whether any other rank has used them decides what their gradients are. `mine` is None in a
    step that a CUDA graph captures, which has no report.
    """
    if reducer.on_finished is not None:
        reducer.on_finished()
    error: Exception | None = None
    reducer.uses = None
    lanes = 0 if reducer.lanes is None else reducer.lanes.count
    if mine is not None and mine.on_device is not None and (lanes or reducer.weighting.mode is Mode.WEIGHTED):
        settle_on_device(mine.on_device, reducer.set, reducer.weighting, reducer.division(), lanes)
    if mine is not None and reducer.turn.unused:
        reducer.wait(mine.work, f"which parameters the other ranks have used in reduction {mine.number}")
        settled = uses_of(mine.peek(), reducer.set, reducer.settings)
        reducer.uses, error = settled.uses, settled.error
    if reducer.turn.part is not Part.ABORTED:
        _give_back(reducer)
    wait_for_buffer_hooks(reducer)
    reducer.dropped = error is not None or reducer.turn.part is Part.ABORTED
    return error


def wait_for_buffer_hooks(reducer: "Reducer") -> None:
    for future in reducer.after_backward:
        reducer.wait(FutureWork(future), f"a buffer hook of backward {reducer.reductions}")
    reducer.after_backward.clear()


def _give_back(reducer: "Reducer") -> None:
    if not reducer.optimizes_in_backward:
        hand_back(reducer.set, reducer.uses, lent=reducer.turn.part is Part.SHADOW)
    reducer.ledger.reduced()


def heard_late(reducer: "Reducer", rows: Sequence[StepReport], found: PendingReports) -> Exception | None:
    """The reports of the reduction before this one have come. Returns the error to raise, the same on every rank."""
    step = f"reduction {found.number}"
    try:
        report.check_together(rows)
        if reducer.lanes is not None:
            lane_shapes.check(rows, reducer.lanes, reducer.group)
    except PacelineError as mismatch:
        return mismatch
    if any(row.abort is not Abort.NO for row in rows):
        own = rows[reducer.transport.rank].abort is not Abort.NO
        return report.aborted_error(rows, _consequence(step, own=own, gated=found.gated))
    if any(row.late for row in rows):
        return late_gradient(reducer.set.slots)
    if rows[0].mode is not Mode.WEIGHTED and not rows[0].lane_weights and any(row.skipped for row in rows):
        return report.skipped_error(rows, step)
    reducer.heard = [row.votes for row in rows]
    error = None if reducer.oversight is None else reducer.oversight.judge(rows, None).error
    if any(row.graph_changed for row in rows):
        error = error or found.graph_error or report.graph_error(rows)
    if reducer.settings.unused == "error" and not error and any(row.unused for row in rows):
        error = uses_of(rows, reducer.set, reducer.settings).error
    return error


def _consequence(step: str, *, own: bool, gated: bool) -> str:
    if own:
        return f"and the others have been told of {step} only now"
    if gated:
        return f"so no rank took the update of {step}"
    return (
        f"which the others learn only now: their last update, that of {step}, lacked the gradients of that rank, and "
        f"replicas may differ"
    )
