"""What a failed attempt has changed beside the update is as it was."""

import random

import torch
from torch import nn

from paceline.elastic.before_attempt import LARGE_BYTES, BeforeAttempt

CPU = torch.device("cpu")


def net() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    module.register_buffer("mask", torch.ones(LARGE_BYTES // 4))
    return module


def mean_of(module: nn.Sequential) -> torch.Tensor:
    return module.get_buffer("1.running_mean")


def test_buffers_and_generators_are_put_back() -> None:
    module = net()
    before = BeforeAttempt([module], CPU)
    for _ in range(3):  # the kept memory is used again
        before.keep()
        wanted = {name: buffer.clone() for name, buffer in module.named_buffers()}
        drawn = (torch.rand(2).tolist(), random.random())
        module(torch.randn(5, 4))
        module.get_buffer("mask").mul_(2)
        assert not torch.equal(mean_of(module), wanted["1.running_mean"])
        before.put_back()
        assert all(torch.equal(buffer, wanted[name]) for name, buffer in module.named_buffers())
        assert (torch.rand(2).tolist(), random.random()) == drawn
        module(torch.randn(5, 4))  # one that counts


def test_a_large_buffer_that_has_not_changed_is_not_copied_again() -> None:
    module = net()
    before = BeforeAttempt([module], CPU)
    before.keep()
    kept = before._kept[0, ".mask"].value
    kept.fill_(7)  # to see whether it is overwritten
    before.keep()
    assert kept[0] == 7
    module.get_buffer("mask").add_(1)
    before.keep()
    assert kept[0] == 2


def test_a_buffer_that_the_attempt_has_replaced_is_the_old_one_again() -> None:
    module = net()
    before = BeforeAttempt([module], CPU)
    before.keep()
    old = module.get_buffer("mask")
    module.mask = torch.zeros(2)
    before.put_back()
    assert module.get_buffer("mask") is old


def test_a_buffer_that_the_script_has_replaced_between_attempts_is_kept_anew() -> None:
    module = net()
    before = BeforeAttempt([module], CPU)
    before.keep()
    module.mask = torch.zeros(2)
    before.keep()
    module.get_buffer("mask").add_(1)
    before.put_back()
    assert module.get_buffer("mask").tolist() == [0, 0]
