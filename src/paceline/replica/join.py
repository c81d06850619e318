"""Uneven inputs: a rank that has run out of data takes part in the others' collectives with zeros."""

from typing import Any

from torch.distributed.algorithms.join import JoinHook

from paceline.reducer.participation import shadow


class ReplicaJoinHook(JoinHook):
    """The work of a rank without data, in the order in which the others do theirs in a step."""

    def __init__(self, replica: Any, *, divide_by_initial_world_size: bool) -> None:
        replica._divide_by_initial_world_size = divide_by_initial_world_size
        self._replica = replica

    def main_hook(self) -> None:
        replica = self._replica
        replica._check_and_sync_module_buffers()
        syncs = replica._check_global_requires_backward_grad_sync(is_joined_rank=True)
        replica.require_forward_param_sync = syncs
        if syncs:
            shadow(replica._core)

    def post_hook(self, is_last_joiner: bool) -> None:
        self._replica._sync_final_model(is_last_joiner)
