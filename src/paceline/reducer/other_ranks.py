"""A reducer goes on with other ranks than before."""

from typing import TYPE_CHECKING

from paceline.collectives.reduction_protocol import Reduction, check_goes_over, forget_other_ranks
from paceline.reducer.planning import Planning
from paceline.reducer.relayout import move_gradients

if TYPE_CHECKING:
    from paceline.reducer.reducer import Reducer


def follow_group(reducer: "Reducer", reduction: Reduction) -> None:
    """The group has moved to another transport. What was learned with the ranks before is forgotten, because ranks that
    were stopped in different places may have taken up different layouts, and learned anew with those of now."""
    check_goes_over(reducer.transport, reduction, reducer.device)
    forget_other_ranks(reduction)
    schedule, buckets = reducer.schedule, reducer.bucket_set
    schedule.reduction = reduction
    schedule.reductions_begun = schedule.launch_digest = 0  # they have reduced nothing together
    reducer.trace.generation = reducer.group.generation
    reducer.batch.follow_group()
    reducer.divisor = reducer.batch.count
    buckets.planned, buckets.layout = None, buckets.first
    if buckets.allocated:
        move_gradients(buckets, reducer.transport)
    reducer.reports.start_over()
    reducer.planning = Planning(reducer.settings, reducer.group, reducer.device)
