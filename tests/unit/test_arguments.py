"""What the constructor refuses, before anything is started. Nothing is left behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from paceline.collectives import LocalTransport
from paceline.errors import PacelineError, UsageError
from paceline.replica.arguments import or_from_environment
from tests.models import DDP


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def frozen() -> nn.Module:
    return linear().requires_grad_(False)


def all_ignored() -> nn.Module:
    module = linear()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["weight", "bias"])
    return module


def wrapped() -> Any:
    return DDP(linear(), transport=LocalTransport())


def wrapped_inside() -> nn.Module:
    return nn.Sequential(nn.Tanh(), wrapped())


MODULES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a number": (lambda: 3, TypeError, "expected a torch.nn.Module to wrap, got int"),
    "nothing": (lambda: None, TypeError, "expected a torch.nn.Module to wrap, got NoneType"),
    "a class": (lambda: nn.Linear, TypeError, "expected a torch.nn.Module to wrap, got type"),
    "a tensor": (lambda: torch.ones(2), TypeError, "got Tensor"),
    "no parameters": (nn.Tanh, RuntimeError, "Tanh has no parameters; use the bare module"),
    "only frozen parameters": (frozen, RuntimeError, "Linear has only frozen or ignored parameters"),
    "only ignored parameters": (all_ignored, RuntimeError, "not needed when a module doesn't have any parameter"),
    "lazy": (lambda: nn.LazyLinear(2), RuntimeError, "weight has no shape yet. Run a dummy forward pass"),
    "a replica": (wrapped, UsageError, "it is already a DistributedDataParallel.*wrap the bare module once"),
    "a replica inside": (wrapped_inside, UsageError, "its submodule '1' is already a DistributedDataParallel"),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_what_cannot_be_wrapped(name: str) -> None:
    build, kind, message = MODULES[name]
    module = build()
    with pytest.raises(kind, match=message):
        DDP(module, transport=LocalTransport())


def test_what_is_on_meta_comes_to_the_device_of_the_rest() -> None:
    module = nn.Sequential(linear(), nn.Linear(2, 2, device="meta"))
    DDP(module, transport=LocalTransport())
    assert all(param.device.type == "cpu" and bool(param.isfinite().all()) for param in module.parameters())


ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception] | tuple[type[Exception], ...], str]] = {
    "init": ({"init": "rank0"}, UsageError, "init='rank0' is not known; accepted: 'broadcast', 'verify'"),
    "init of another type": ({"init": None}, UsageError, "init=None is not known"),
    "unused": ({"unused": "ignore"}, UsageError, "unused='ignore' is not known; accepted: 'zero', 'error'"),
    "unused of another type": ({"unused": True}, UsageError, "unused=True is not known"),
    "transport": ({"transport": "carrier pigeon"}, UsageError, "transport='carrier pigeon' is not known; accepted:"),
    "transport of another type": ({"transport": 3}, (UsageError, TypeError), "transport"),
    "transport None": ({"transport": None}, (UsageError, TypeError), "transport"),
    "reduction of another type": ({"reduction": "mean"}, (UsageError, TypeError), "reduction"),
    "reduction as a dtype": ({"reduction": torch.bfloat16}, (UsageError, TypeError), "reduction"),
    "timeout zero": ({"timeout": 0}, UsageError, "timeout=0 is not a time; expected seconds above zero"),
    "timeout below zero": ({"timeout": -1.0}, UsageError, "timeout=-1.0 is not a time"),
    "timeout NaN": ({"timeout": float("nan")}, UsageError, "timeout=nan is not a time"),
    "timeout without end": ({"timeout": float("inf")}, UsageError, "timeout=inf is not a time"),
    "timeout of another type": ({"timeout": "30s"}, UsageError, "timeout='30s' is not a time"),
    "bucket zero": ({"bucket_cap_mb": 0}, UsageError, "above zero, got 0"),
    "bucket below zero": ({"bucket_cap_mb": -25}, UsageError, "above zero, got -25"),
    "bucket NaN": ({"bucket_cap_mb": float("nan")}, UsageError, "above zero, got nan"),
    "bucket of another type": ({"bucket_cap_mb": "25"}, UsageError, "above zero, got '25'"),
    "bucket list": ({"bucket_cap_mb_list": [1, 0]}, UsageError, "above zero, got 0"),
    "bucket list of another type": ({"bucket_cap_mb_list": ["1"]}, UsageError, "above zero, got '1'"),
    "half of a pair": ({"delay_all_reduce_named_params": []}, ValueError, "need to be set at the same time"),
    "device_ids on CPU": ({"device_ids": [0]}, ValueError, "device_ids and output_device arguments only work with"),
    "two device_ids": ({"device_ids": [0, 1]}, ValueError, "device_ids can only be None or contain a single element"),
    "group and mesh": (
        {"transport": "auto", "process_group": object(), "device_mesh": object()},
        RuntimeError,
        "Cannot specify both process_group and device_mesh",
    ),
    "group of another type": ({"transport": "auto", "process_group": "gloo"}, (UsageError, TypeError), "process.group"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_cannot_work(name: str) -> None:
    arguments, kind, message = ARGUMENTS[name]
    module, watched = linear(), len(_global_optimizer_pre_hooks)
    with pytest.raises(kind, match=message):
        DDP(module, **{"transport": LocalTransport(), **arguments})
    assert not any(param._post_accumulate_grad_hooks for param in module.parameters())
    assert len(_global_optimizer_pre_hooks) == watched
    DDP(module, transport=LocalTransport())  # and the module is as good as before


@pytest.mark.parametrize("transport", ["auto", "torch"])
def test_without_a_process_group(transport: str) -> None:
    with pytest.raises(ValueError, match=r"Default process group has not been initialized: call paceline.init\(\)"):
        DDP(linear(), transport=transport)


def test_every_error_of_ours_tells_the_argument_from_a_crash() -> None:
    with pytest.raises(PacelineError):
        DDP(linear(), init="x", transport=LocalTransport())


def test_a_refused_wrap_of_a_replica_leaves_it_working() -> None:
    model = DDP(linear(), transport=LocalTransport())
    with pytest.raises(UsageError):
        DDP(model, transport=LocalTransport())
    model(torch.ones(1, 2)).sum().backward()
    assert model.module.weight.grad is not None


def test_nothing_of_a_replica_outlives_it() -> None:
    module = linear()
    counts = []
    for _ in range(3):
        model = DDP(module, transport=LocalTransport())
        model(torch.ones(1, 2)).sum().backward()
        counts.append(len(_global_optimizer_pre_hooks))
        del model
        assert not any(param._post_accumulate_grad_hooks for param in module.parameters())
    assert counts[1] == counts[2], "the hook of a replica that is gone is removed when the next one is made"


def test_the_deprecated_arguments_warn_as_torch_does() -> None:
    with pytest.warns(FutureWarning, match="`broadcast_buffers` is deprecated"):
        DDP(linear(), transport=LocalTransport(), broadcast_buffers=True)
    with pytest.warns(FutureWarning, match="`check_reduction` argument"):
        DDP(linear(), transport=LocalTransport(), check_reduction=True)


def test_the_environment_says_what_the_constructor_was_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LANES", "3")
    monkeypatch.setenv("PACELINE_TRANSPORT", "shm")
    assert or_from_environment("auto", None) == ("shm", 3)
    assert or_from_environment("torch", 2) == ("torch", 2)
    monkeypatch.setenv("PACELINE_LANES", "many")
    with pytest.raises(UsageError, match="PACELINE_LANES='many' is not a number of lanes"):
        or_from_environment("auto", None)


def test_what_torch_has_since_2_15_is_taken_or_refused() -> None:
    model = DDP(linear(), transport=LocalTransport(), lazy_bucket_allocation=True)
    model.require_manual_backward_finalization = False
    assert not model.require_manual_backward_finalization and not model.should_finalize_after_backward
    with pytest.raises(UsageError, match="sync_gradients"):
        model.require_manual_backward_finalization = True
    with pytest.raises(UsageError, match="sync_gradients"):
        model.finalize_backward()
