"""The next generation, from its members' messages: its members, and the state from which it continues."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from paceline.member_messages import NEVER, Generation, MemberReady

Ready = Mapping[int, MemberReady]


class _State(NamedTuple):
    """A state that some members hold between them: its step, the number of shards, and the holders of each."""

    step: int
    shards: int
    holders: Mapping[int, Sequence[int]]


def world_sizes(ready: MemberReady, minimum: int, maximum: int) -> list[int]:
    """The world sizes that a script accepts, from `minimum` to `maximum`."""
    return [
        size
        for size in range(minimum, maximum + 1)
        if size % ready.multiple == 0 and (not ready.divides or ready.divides % size == 0)
    ]


def choose_members(candidates: Sequence[int], ready: Ready, maximum: int) -> list[int]:
    """The members of the next generation, in the order of ranks: as many as the script accepts, among them the holders
    of every shard of the newest complete state. A holder keeps its position if the cut into shards stays the same;
    otherwise the order is that of the candidates."""
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
    """Generation `number`, with these members in this order.

    All continue from the newest step of which they hold every shard between them; if no state is sharded, that is the
    first whole member at the highest step. One member at that step is enough: finished sums have equal bits everywhere,
    so what one rank has committed is what all would have. Before any generation was formed all have their initial
    state, and the first member that does not hold just a shard decides. If no state is complete there are no sources.
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
    """For each rank, a member that holds the shard of that rank, if there is one."""
    left = {shard: list(holders) for shard, holders in state.holders.items()}
    seats = [left[rank % state.shards].pop(0) if left[rank % state.shards] else None for rank in range(size)]
    others = iter([member for member in candidates if member not in seats])
    return [next(others) if seat is None else seat for seat in seats]
