"""A reducer leaves its ranks behind: their process group is gone, and what was under way with it."""

import torch

from paceline.collectives.reduction import check_goes_over, forget_other_ranks
from paceline.collectives.watcher import Watcher
from paceline.reducer.planning import Planning
from paceline.reducer.reducer import Reducer


def give_up(reducer: Reducer) -> None:
    """Forget the backward and the gradients that are under way, without a word to the other ranks.

    `Reducer.abandon` would complete the reduction that they wait for, over a transport that is no more.
    """
    with reducer.lock, torch.no_grad():
        reducer.backwards.close()
        reducer.set.drop_gradients()
        reducer.after_backward.clear()
        reducer.reset()
        reducer.dropped = True


def begin_anew(reducer: Reducer) -> None:
    """The group has moved to another transport; the order of gradients is learned anew by the new set of ranks."""
    transport, device = reducer.transport, reducer.set.layout.params[0].device
    check_goes_over(transport, reducer.reduction, device)
    forget_other_ranks(reducer.reduction)
    if reducer.lanes is not None:
        reducer.lanes.deal(transport.rank, transport.size)
    reducer.divisor = reducer.everyone
    reducer.reductions = reducer.calls = 0
    reducer.set.move_memory(transport)
    reducer.unheard.clear()  # nobody answers them any more
    reducer.watcher.close()
    reducer.watcher = Watcher(reducer.group)
    reducer.planning = Planning(reducer.settings, reducer.group, device)
