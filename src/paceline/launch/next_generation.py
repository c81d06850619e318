"""The next generation, from what its members have said of themselves: who is in it, and whose state it goes on from."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from paceline.member_messages import NEVER, Generation, MemberReady

Ready = Mapping[int, MemberReady]


class _State(NamedTuple):
    """A state that some members have between them: of a step, cut into so many shards, and who has each of these."""

    step: int
    shards: int
    holders: Mapping[int, Sequence[int]]


def world_sizes(ready: MemberReady, minimum: int, maximum: int) -> list[int]:
    """The numbers of ranks that a script can work with, between these two."""
    return [
        size
        for size in range(minimum, maximum + 1)
        if size % ready.multiple == 0 and (not ready.divides or ready.divides % size == 0)
    ]


def choose_members(candidates: Sequence[int], ready: Ready, maximum: int) -> list[int]:
    """Who is in the next generation, in the order of ranks: as many as the script can work with, and among them every
    shard of the newest state that is whole. Whoever holds a shard stays where it is needed, if shards stay what they
    are; otherwise the order is that of the candidates."""
    sizes = world_sizes(ready[candidates[0]], 1, min(maximum, len(candidates))) if candidates else []
    size, state = max(sizes, default=0), _newest_whole(candidates, ready)
    if state is None or size < state.shards:
        return list(candidates[:size])
    if state.shards > 1 and size % state.shards == 0:
        return _seated(candidates, state, size)
    needed = [holders[0] for _, holders in sorted(state.holders.items())]
    others = [member for member in candidates if member not in needed]
    taken = {*needed, *others[: max(0, size - len(needed))]}
    return [member for member in candidates if member in taken][:size]


def next_generation(number: int, members: Sequence[int], ready: Ready, ever_formed: bool) -> Generation:
    """Generation `number`, of these members in this order.

    All go on from the newest step of which they have every shard between them; where no state is cut, that is the first
    whole member at the highest step. One at that step is enough: finished sums have equal bits everywhere, so what one
    rank has committed is what all would have. Before anything was ever formed all are as their scripts have made them,
    and the first decides that has not been given a shard alone. If no state is whole there are no sources.
    """
    state = _newest_whole(members, ready)
    if state is not None:
        sources = tuple(state.holders[shard][0] for shard in range(state.shards))
        return Generation(number, tuple(members), sources, state.step, fresh=False)
    uncut = [member for member in members if ready[member].shards == 1]
    if not ever_formed and uncut:
        return Generation(number, tuple(members), (uncut[0],), ready[uncut[0]].step, fresh=True)
    return Generation(number, tuple(members), (), NEVER, fresh=False)


def _newest_whole(members: Iterable[int], ready: Ready) -> _State | None:
    found: dict[tuple[int, int], dict[int, list[int]]] = {}
    for member in members:
        if (one := ready[member]).whole:
            found.setdefault((one.step, one.shards), {}).setdefault(one.shard, []).append(member)
    whole = [(step, shards) for (step, shards), holders in found.items() if len(holders) == shards]
    return _State(*max(whole), found[max(whole)]) if whole else None


def _seated(candidates: Sequence[int], state: _State, size: int) -> list[int]:
    """Each rank with a member that holds the shard of that rank, as far as there are any."""
    left = {shard: list(holders) for shard, holders in state.holders.items()}
    seats = [left[rank % state.shards].pop(0) if left[rank % state.shards] else None for rank in range(size)]
    others = iter([member for member in candidates if member not in seats])
    return [next(others) if seat is None else seat for seat in seats]
