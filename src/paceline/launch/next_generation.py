"""The next generation, from what its members have said of themselves."""

from collections.abc import Mapping, Sequence

from paceline.member_messages import NEVER, Generation, MemberReady


def next_generation(
    number: int, members: Sequence[int], ready: Mapping[int, MemberReady], ever_formed: bool
) -> Generation:
    """Generation `number`, of these members in this order.

    All take the state of the first whole one at the highest step. One at that step is enough: finished sums have equal
    bits everywhere, so what one rank has committed is what all would have. Before anything was ever formed all are as
    their scripts have made them, and the first decides. If nobody is whole there is no source.
    """
    whole = [ready[member].step for member in members if ready[member].whole]
    if whole:
        step = max(whole)
        source = next(one for one in members if ready[one].whole and ready[one].step == step)
        equal = len(whole) == len(members) and min(whole) == step
        return Generation(number, tuple(members), source, step, heal=not equal)
    if not ever_formed:
        return Generation(number, tuple(members), members[0], ready[members[0]].step, heal=len(members) > 1)
    return Generation(number, tuple(members), None, NEVER, heal=True)
