"""Digests of tensors on a device: the same as on the host, and nobody waits for them."""

from typing import Any

import pytest
import torch

from paceline.agree.state_digest import start_digest, state_digest
from tests.gpu.ranks import nobody_waits


def same_as_on_the_host(rank: int, size: int) -> None:
    tensors = [torch.randn(3, 5), torch.randn(3_000_001).bfloat16(), torch.tensor(True), torch.randn(70, 300).t()]
    for tensor in tensors:
        assert state_digest([tensor.cuda()]) == state_digest([tensor])
    assert state_digest([tensor.cuda() for tensor in tensors]) == state_digest(tensors)
    step = torch.tensor(3.0)  # as optimizers keep it, on the host
    assert state_digest([*(tensor.cuda() for tensor in tensors), step]) != state_digest(
        [*(t.cuda() for t in tensors), step + 1]
    )


def not_waited_for(rank: int, size: int) -> None:
    large = torch.ones(1 << 24, device="cuda")
    tensors = [large, *large[:64].split(8)]
    expected = state_digest(tensors)
    torch.cuda.synchronize()
    with nobody_waits():
        torch.cuda._sleep(200_000_000)
        started = start_digest(tensors)
        assert not torch.cuda.current_stream().query()
        large.zero_()  # behind it on the stream
    assert started.value() == expected != state_digest(tensors)


@pytest.mark.parametrize("check", [same_as_on_the_host, not_waited_for])
def test_digests_on_a_device(procs: Any, check: Any) -> None:
    procs(1).run(check, group=False)
