"""One reduction under way on this rank: in what part it takes part, and its words."""

from enum import Enum, auto
from typing import TYPE_CHECKING

from paceline.collectives.api import Work
from paceline.errors import GraphChanged
from paceline.reducer.agreement import SentWords, Vote, Words
from paceline.reducer.lane_shapes import word_of_shapes
from paceline.reducer.oversight import Findings

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
        self.broken = False  # the reduction itself raised, so it is not known what the other ranks were sent
        self.late = 0  # gradients that came after their bucket had left
        self.graph_error: GraphChanged | None = None
        self._sent: SentWords | None = None

    def speak(self, reducer: "Reducer") -> None:
        """Send the words of this rank, once."""
        if self._sent is not None:
            return
        slots, lanes = reducer.set.slots, reducer.lanes
        whole = self.part is Part.WHOLE
        counts = whole or (lanes is not None and self.part is Part.SKIPPED)  # earlier lanes have used what they have
        everything = len(reducer.ready_order) == len(slots)
        if whole:
            static = reducer.settings.static_graph
            self.graph_error = reducer.graph.compare(slots, everything=everything, static=static)
        found = Findings()
        if reducer.oversight is not None:
            found = reducer.oversight.findings()
            if self.part is Part.SHADOW:  # its parameters are behind until join() ends
                found = Findings(not_finite=found.not_finite)
        words = Words(
            reduction=reducer.reductions,
            unused=0 if everything or not counts else reducer.set.unused(),
            late=self.late,
            mode=reducer.weighting.mode,
            weight=reducer.weighting.total,
            micros=reducer.weighting.micros if lanes is None else 0,  # ranks may run different numbers of lanes
            ready=len(reducer.ready_order),
            graph_changed=self.graph_error is not None,
            aborted=self.part is Part.ABORTED,
            skipped=self.part is Part.SKIPPED,
            votes=reducer.votes,
            calls=reducer.calls,
            state=found.state,
            signature=found.signature,
            not_finite=found.not_finite,
            lane_step=0 if lanes is None else lanes.step,
            lane_shape=0 if lanes is None else word_of_shapes(lanes),
            lane_weights=() if lanes is None else tuple(lanes.weights),
        )
        self._sent = SentWords(words, reducer.transport)
        reducer.votes = Vote.NOTHING

    @property
    def words_work(self) -> Work:
        assert self._sent is not None
        return self._sent.work

    def heard(self) -> list[Words]:
        """The words of all ranks, once `words_work` is complete."""
        assert self._sent is not None
        return self._sent.of_all_ranks()
