"""Damaged messages between ranks: some ranks have detected them, and all raise the same error."""

from collections.abc import Sequence

from paceline.collectives.gather import gather_unless_equal
from paceline.collectives.group import Group
from paceline.errors import MessageDamaged
from paceline.reducer.report import Abort, StepReport

WHAT = "which messages were damaged"


def check_damage(rows: Sequence[StepReport], seen: Sequence[tuple[int, int]], group: Group) -> None:
    """Raise on every rank if one has reported damage. `seen`: bucket and sender of each damaged message received
    here."""
    if not any(row.abort is Abort.DAMAGED for row in rows):
        return
    own = [list(pair) for pair in seen]
    by_rank = gather_unless_equal(group, own, WHAT) or [own] * group.size
    found = sorted({(sender, bucket, rank) for rank, pairs in enumerate(by_rank) for bucket, sender in pairs})
    senders = sorted({sender for sender, _, _ in found})
    ways = [f"bucket {bucket} from rank {sender} to rank {rank}" for sender, bucket, rank in found]
    more = f" and {len(ways) - 3} more" if len(ways) > 3 else ""
    raise MessageDamaged(
        f"messages were damaged on their way in step {rows[0].lane_step}: {', '.join(ways[:3])}{more}. No rank has "
        f"used these sums; run the step again. If it happens again, suspect the network between these machines, or "
        f"the memory of the sender",
        ranks=senders,
    )
