"""What the user chose about reducing gradients."""

from dataclasses import dataclass

from paceline.layout import BucketCaps


@dataclass(slots=True)
class ReducerSettings:
    """What the user chose, equal on every rank. The replica and its reducer share one."""

    caps: BucketCaps
    plans_buckets: bool = False  # sizes are planned from measured times; until then, and without it, `caps` applies
    keeps_layout: bool = False  # buckets keep their first layout, as those of units do
    overlap: bool = True
    unused: str = "zero"  # or "error"
    static_graph: bool = False
    skip_unused: bool = False  # the user guarantees that ranks agree on unused parameters: leave out unused buckets
    # A rank's report is sent after its sums are complete: reading those of all ranks shows that all have theirs.
    report_last: bool = False
    hold: bool = False  # never show unreduced gradients: their dtype is not the parameter's (mixed precision)

    @property
    def asks_for_uses(self) -> bool:
        """Whether it matters which parameters took part, even in a world of one."""
        return self.unused == "error" or self.static_graph
