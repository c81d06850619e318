"""A reducer leaves its ranks behind: their process group is gone, and what was under way with it."""

import torch

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
