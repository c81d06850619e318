"""Master weights: what they take from parameters, and what an update with them launches."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.collectives import Transport
from paceline.collectives.threads import run
from paceline.errors import UsageError
from paceline.replica import master_weights
from tests.models import DDP, Grads, assert_same_bits, draw, mlp, needs_masters, seeded

pytestmark = needs_masters

PLACEMENTS = ("ddp", "zero1", "zero2", "zero3")
# What a device has nothing to do for.
NO_KERNELS = {"detach", "alias", "as_strided", "view", "slice", "split", "split_with_sizes", "empty", "empty_like"}
NO_KERNELS |= {"new_empty", "set_", "expand", "empty_strided", "resize_", "select", "t"}
WAITS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "any", "all"}


class Launches(TorchDispatchMode):
    """Counts the kernels that are called on this thread, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


def weights_of(model: Any) -> Grads:
    with model.whole():
        return {name: param.detach().clone() for name, param in model.module.named_parameters()}


def backward(model: Any, seed: int) -> None:
    model(draw(seed, 4, 8).bfloat16()).float().square().mean().backward()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_update_launches_as_much_for_many_parameters_as_for_few(placement: str) -> None:
    """And nothing whose result the host would have to wait for. Gathers of parameters, which follow, are left out."""

    def body(transport: Transport, layers: int) -> Counter[str]:
        module = seeded(nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))).bfloat16()
        model = DDP(module, transport=transport, placement=placement, timeout=20)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1, foreach=True, master="float32")
        for number in range(2):
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
        backward(model, 2)
        model._owned.follow_update = lambda: None
        launches = Launches()
        with launches:
            optimizer.step()
        return launches.counts

    for few, many in zip(run(lambda t: body(t, 3), 2), run(lambda t: body(t, 17), 2), strict=True):
        assert WAITS.isdisjoint(many), many
        assert {name: count for name, count in few.items() if name not in NO_KERNELS} == {
            name: count for name, count in many.items() if name not in NO_KERNELS
        }
        assert sum(count for name, count in many.items() if name not in NO_KERNELS) < 12


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("how", ["in place", "data", "nan", "some"])
def test_masters_take_what_was_done_to_parameters(placement: str, how: str) -> None:
    """Also what is done to `param.data`, which counts no version."""

    def body(which: str, transport: Transport) -> Grads:
        model = DDP(mlp(8, 700, 5).bfloat16(), transport=transport, placement=which, timeout=20)
        optimizer = model.optimizer(torch.optim.SGD, lr=1e-3, master="float32")
        for number in range(3):
            with torch.no_grad(), model.whole():
                for param in model.module.parameters():
                    if how == "in place":
                        param.clamp_(-0.2, 0.2)
                    elif how == "data":
                        param.data.clamp_(-0.2, 0.2)
                    elif how == "nan":  # and back from it
                        param.fill_(torch.nan if number == 1 else 0.25)
                    else:
                        param.data.view(-1)[::3] = 0.125
            backward(model, 10 * transport.rank + number)
            optimizer.step()
            optimizer.zero_grad()
        masters = {str(index): state["master"] for index, state in optimizer.state_dict()["state"].items()}
        return weights_of(model) | masters

    expected = run(lambda transport: body("ddp", transport), 2)[0]
    for mine in run(lambda transport: body(placement, transport), 2):
        assert_same_bits(mine, expected)
    bound = {"in place": 0.21, "data": 0.21, "nan": 0.5, "some": 10.0}[how]
    assert all(value is not None and bool((value.abs() < bound).all()) for value in expected.values())


@pytest.mark.parametrize("at_a_time", [1, 100, 2048, 1 << 20])
def test_what_is_compared_at_a_time_changes_nothing(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, cut, together, and all at once: as the comparison of each element says."""
    monkeypatch.setattr(master_weights, "AT_A_TIME_ON_HOST", at_a_time)

    class OneShard:
        def __init__(self, seed: int, size: int, kind: torch.dtype) -> None:
            wide = draw(seed, size)
            wide[::7] = torch.nan
            self.value, self.block = nn.Parameter(wide.clone()), wide.to(kind)
            self.block[::5] = draw(seed + 1, size)[::5].to(kind)
            rounded = wide.to(kind)
            changed = self.block.ne(rounded) & ~(self.block.isnan() & rounded.isnan())
            self.expected = torch.where(changed, self.block.float(), wide)

    sizes = (1, 64, 0, 300, 5000 if at_a_time > 1 else 50, 3)
    shards: Any = [
        OneShard(seed, size, torch.float16 if seed % 3 == 2 else torch.bfloat16) for seed, size in enumerate(sizes)
    ]
    with torch.no_grad():
        master_weights.take_changes(shards)
    for shard in shards:
        assert torch.equal(shard.value.nan_to_num(1e9), shard.expected.nan_to_num(1e9))
    for window in master_weights._windows(shards):
        assert sum(block.numel() for block, _ in window) <= at_a_time


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_type_of_masters_may_be_a_name(placement: str) -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(8, 64, 5).bfloat16(), transport=transport, placement=placement, timeout=20)
        for strange in ("float31", "int8", torch.int8, "Tensor", 4, "cuda:0"):
            with pytest.raises(UsageError, match=r"master=.* is not a floating point type; expected one such as"):
                model.optimizer(torch.optim.SGD, master=strange)
        optimizer = model.optimizer(torch.optim.SGD, master="float32")
        params = [param for group in optimizer.param_groups for param in group["params"]]
        assert {param.dtype for param in params} == {torch.float32}

    run(body, 2)
