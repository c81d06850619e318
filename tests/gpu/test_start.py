"""init on a machine with a CUDA device."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.start import init, shutdown
from paceline.world import World


def start_and_reduce(rank: int, size: int, asked: str | None) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    world = init(device=asked)
    try:
        assert world.device == torch.device("cuda", torch.cuda.current_device())
        for device in (torch.device("cpu"), world.device):
            tensor = torch.ones(2, device=device)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [1.0, 1.0]
    finally:
        shutdown()


@pytest.mark.parametrize("asked", [None, "cuda", "cuda:0"])
def test_the_device_is_chosen_and_both_kinds_of_tensor_are_reduced(procs: Any, asked: str | None) -> None:
    procs(1).run(start_and_reduce, asked, group=False)


def device_of_rank_3(rank: int, size: int) -> tuple[int, str]:
    return torch.cuda.device_count(), str(World(rank=3, size=4, local_rank=3, local_size=4).device)


def test_a_single_visible_device_serves_every_local_rank(procs: Any) -> None:
    ((devices, chosen),) = procs(1).run(device_of_rank_3, group=False)
    assert chosen == ("cuda:0" if devices == 1 else "cuda:3")
