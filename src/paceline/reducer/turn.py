"""One reduction under way on this rank: in what part it takes part, and what it reports."""

from enum import Enum, auto
from typing import TYPE_CHECKING

from paceline.collectives.event_work import EventWork
from paceline.errors import GraphChanged
from paceline.reducer.backward import beside
from paceline.reducer.exchange import PendingReports
from paceline.reducer.lane_shapes import word_of_shapes
from paceline.reducer.oversight import Findings
from paceline.reducer.report import Abort, StepReport, used_bits

if TYPE_CHECKING:
    from paceline.reducer.reducer import Reducer


class Part(Enum):
    """How this rank takes part in a reduction."""

    WHOLE = auto()  # with the gradients of its backwards
    SHADOW = auto()  # with zeros, and it keeps its own gradients: a rank without data inside join()
    SKIPPED = auto()  # with nothing that counts, but it takes the mean of the others
    ABORTED = auto()  # its backward failed: nobody has gradients of this step


class Turn:
    """What is known of the reduction that is under way, or comes next. Each one begins with a new `Turn`."""

    def __init__(self) -> None:
        self.part = Part.WHOLE
        self.abort = Abort.NO
        self.broken = False  # the reduction itself raised, so it is not known what the other ranks were sent
        self.late = 0  # gradients that came after their bucket had left
        self.unused = 0  # parameters that took no part here, where that matters
        self.graph_error: GraphChanged | None = None
        self.sent: PendingReports | None = None
        self.computed: EventWork | None = None  # done when the device has computed what is sent

    def report(self, reducer: "Reducer", found: Findings) -> StepReport:
        """What this rank tells the others of this reduction."""
        slots, lanes = reducer.set.slots, reducer.lanes
        whole = self.part is Part.WHOLE
        counts = whole or (lanes is not None and self.part is Part.SKIPPED)  # earlier lanes have used what they have
        everything = len(reducer.ready_order) == len(slots)
        if whole:
            static = reducer.settings.static_graph
            self.graph_error = reducer.graph.compare(slots, everything=everything, static=static)
        self.unused = 0 if everything or not counts else reducer.set.unused()
        state, not_finite = found.state, found.not_finite
        shadow = self.part is Part.SHADOW  # its parameters are behind until join() ends
        return StepReport(
            reduction=reducer.reductions,
            unused=self.unused,
            late=self.late,
            mode=reducer.weighting.mode,
            weight=reducer.weighting.total,
            micros=reducer.weighting.micros if lanes is None else 0,  # ranks may run different numbers of lanes
            ready=len(reducer.ready_order),
            graph_changed=self.graph_error is not None,
            abort=self.abort,
            skipped=self.part is Part.SKIPPED,
            votes=reducer.votes,
            calls=reducer.calls,
            state=state if isinstance(state, int) and not shadow else 0,
            signature=0 if shadow else found.signature,
            not_finite=not_finite if isinstance(not_finite, int) else 0,
            lane_step=0 if lanes is None else lanes.step,
            lane_shape=0 if lanes is None else word_of_shapes(lanes),
            several=beside.of(reducer) is not None,
            asleep=0 if everything else reducer.set.asleep(),
            used=reducer.set.all_used if everything else used_bits(slots),
            lane_weights=() if lanes is None else tuple(lanes.weights),
        )


def abort(reducer: "Reducer") -> None:
    """Complete a reduction that the others wait for, without gradients, and tell them."""
    reducer.set.drop_gradients()
    reducer.turn.part = Part.ABORTED
    if reducer.turn.abort is Abort.NO:
        reducer.turn.abort = Abort.EXCEPTION
    reducer.finish()
