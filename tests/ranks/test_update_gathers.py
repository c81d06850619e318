"""Updated parameters that come while this rank goes on: whoever uses one waits for it, in whatever way."""

import copy
import gc
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.collectives import Transport
from paceline.collectives.threads import run
from paceline.errors import PeerLost
from paceline.replica.pending_parameter import PendingParameter
from tests.models import DDP, draw, mlp

WIDTHS = (8, 300, 200, 300, 5)

Values = list[torch.Tensor]


def wrap(transport: Transport, placement: str = "zero1", net: nn.Module | None = None) -> tuple[Any, Any]:
    model = DDP(mlp(*WIDTHS) if net is None else net, transport=transport, placement=placement, timeout=20)
    return model, model.optimizer(torch.optim.AdamW, lr=0.01)


def update(model: Any, optimizer: Any, seed: int) -> None:
    model(draw(seed, 4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def pending(model: Any) -> list[str]:
    return [name for name, param in model.module.named_parameters() if type(param) is not nn.Parameter]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather for every parameter."""
    monkeypatch.setattr("paceline.replica.owned.PIECE_BYTES_ON_HOST", 16)


def expected(net: Callable[[], nn.Module] = lambda: mlp(*WIDTHS), steps: int = 1) -> Values:
    """The parameters after some steps of plain ddp."""

    def body(transport: Transport) -> Values:
        model, optimizer = wrap(transport, "ddp", net())
        for step in range(steps):
            update(model, optimizer, 10 * step + transport.rank)
        return [param.detach().clone() for param in model.module.parameters()]

    return run(body, 2)[0]


def assert_equal(found: Any, values: Values) -> None:
    assert len(found) == len(values)
    for ours, theirs in zip(found, values, strict=True):
        assert type(ours) in (torch.Tensor, nn.Parameter) and torch.equal(ours, theirs)


@pytest.mark.parametrize("placement", ["zero1", "zero2"])
def test_a_step_ends_before_other_ranks_have_made_theirs(placement: str) -> None:
    stepped = threading.Event()

    def body(transport: Transport) -> Values:
        model, optimizer = wrap(transport, placement)
        model(draw(transport.rank, 4, 8)).square().mean().backward()
        if transport.rank:
            assert stepped.wait(20)
        optimizer.step()
        assert len(pending(model)) == 8
        stepped.set()
        return [param.detach() for param in model.parameters()]

    for found in run(body, 2):
        assert_equal(found, expected())


def saved(net: nn.Module) -> Values:
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    return list(torch.load(file).values())


def on_a_thread(net: nn.Module) -> Values:
    found: list[torch.Tensor] = []
    reader = threading.Thread(target=lambda: found.extend(param.clone() for param in net.parameters()))
    reader.start()
    reader.join()
    return found


def averaged(net: nn.Module) -> Values:
    found = [torch.zeros_like(param) for param in net.parameters()]
    torch._foreach_lerp_(found, list(net.parameters()), 1.0)
    return found


def swapped(net: nn.Module) -> Values:
    found = [nn.Parameter(torch.zeros(1)) for _ in net.parameters()]
    for ours, theirs in zip(found, net.parameters(), strict=True):
        torch.utils.swap_tensors(ours, theirs)
    return [param * 1 for param in found]


USES: dict[str, Callable[[Any], Any]] = {
    "parameters": lambda net: [param * 1 for param in net.parameters()],
    "data": lambda net: [param.data for param in net.parameters()],
    "numpy": lambda net: [torch.from_numpy(param.detach().numpy()) for param in net.parameters()],
    "data_ptr": lambda net: [param.data_ptr() and param for param in net.parameters()],
    "storage": lambda net: [param.untyped_storage() and param for param in net.parameters()],
    "state_dict": lambda net: list(net.state_dict().values()),
    "state_dict that keeps parameters": lambda net: [v + 0 for v in net.state_dict(keep_vars=True).values()],
    "copy": lambda net: [copy.copy(param) for param in net.parameters()],
    "deepcopy": lambda net: list(copy.deepcopy(net).parameters()),
    "pickle": lambda net: list(pickle.loads(pickle.dumps(net)).parameters()),
    "save": saved,
    "aten": lambda net: [torch.ops.aten.clone(param) for param in net.parameters()],
    "repr": lambda net: repr(list(net.parameters())) and list(net.parameters()),
    "vector": lambda net: list(
        nn.utils.parameters_to_vector(net.parameters()).split([param.numel() for param in net.parameters()])
    ),
    "a thread": on_a_thread,
    "an average": averaged,
    "swap_tensors": swapped,
    "functional_call": lambda net: (
        torch.func.functional_call(net, dict(net.named_parameters()), draw(0, 2, 8)) is not None
        and list(net.parameters())
    ),
}


@pytest.mark.parametrize("use", USES)
def test_whoever_uses_a_parameter_has_its_values(use: str) -> None:
    def body(transport: Transport) -> list[torch.Tensor]:
        model, optimizer = wrap(transport)
        update(model, optimizer, transport.rank)
        assert len(pending(model)) == 8
        shapes = [param.shape for param in model.parameters()]
        with torch.no_grad():
            return [v.reshape(shape).detach() for v, shape in zip(USES[use](model.module), shapes, strict=True)]

    for found in run(body, 2):
        assert_equal(found, expected())


def test_copies_wait_for_nothing_any_more() -> None:
    def body(transport: Transport) -> None:
        model, optimizer = wrap(transport)
        update(model, optimizer, transport.rank)
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model.module)))
        assert all(type(param) is nn.Parameter for param in copied.parameters())
        assert pending(model) == []
        assert all(not layer._forward_pre_hooks for layer in model.module.modules())
        copied(draw(0, 2, 8)).sum().backward()

    run(body, 2)


def test_what_a_parameter_is_like_can_be_asked_at_once() -> None:
    def body(transport: Transport) -> None:
        model, optimizer = wrap(transport)
        update(model, optimizer, transport.rank)
        for param in model.parameters():
            assert isinstance(param, nn.Parameter) and param.is_leaf and param.requires_grad and param.grad_fn is None
            assert param.numel() == param.shape.numel() and param.size() == param.shape and param.dim() == param.ndim
            assert param.dtype is torch.float32 and param.device.type == "cpu" and param in {param}
            assert type(type(param)(torch.zeros(2))) is nn.Parameter
            assert param.grad is None
            param.grad = torch.zeros_like(param.grad) if param.grad is not None else None
        model.zero_grad()
        optimizer.zero_grad()
        assert len(pending(model)) == 8

    run(body, 2)


class Kernel(nn.Linear):
    """Uses its parameters as an extension in C++ would: nothing tells torch's Python side."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return super().forward(x)


class Block(nn.Module):
    """Uses the parameters of a module inside without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert type(self.inside.weight) is nn.Parameter
        with torch._C.DisableTorchFunctionSubclass():
            return x + nn.functional.linear(x, self.inside.weight, self.inside.bias)


def with_kernels() -> nn.Module:
    return nn.Sequential(mlp(8, 64, 8), Block(), Block(), Kernel(8, 64), nn.Sequential(Kernel(64, 8)))


def test_modules_wait_before_their_forward() -> None:
    """For all that they have, so that kernels need not wait; and the next ones still come meanwhile."""

    def body(placement: str) -> Callable[[Transport], Values]:
        def train(transport: Transport) -> Values:
            net = with_kernels()
            for number, param in enumerate(net.parameters()):
                param.data.copy_(draw(number, *param.shape) * 0.3)
            model, optimizer = wrap(transport, placement, net)
            for step in range(4):
                update(model, optimizer, 10 * step + transport.rank)
            return [param.detach().clone() for param in net.parameters()]

        return train

    plain = run(body("ddp"), 2)[0]
    for found in run(body("zero1"), 2):
        assert_equal(found, plain)


@pytest.mark.usefixtures("small_pieces")
def test_a_forward_waits_for_one_unit_after_another() -> None:
    def body(transport: Transport) -> list[int]:
        model, optimizer = wrap(transport)
        update(model, optimizer, transport.rank)
        left: list[int] = []
        for layer in list(model.module)[::2]:
            layer.register_forward_hook(lambda *_: left.append(len(pending(model))))
        model(draw(0, 2, 8))
        return left

    assert run(body, 2) == [[6, 4, 2, 0]] * 2


def test_what_is_evaluated_first_waits_for_all() -> None:
    """Kernels may be chosen by whether a parameter is an ordinary one."""

    def body(transport: Transport) -> None:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        model, optimizer = wrap(transport, "zero1", nn.Sequential(nn.TransformerEncoder(layer, 1), nn.Linear(8, 8)))
        model(draw(transport.rank, 2, 4, 8)).square().mean().backward()
        optimizer.step()
        assert pending(model)
        model.eval()
        model.module[0].register_forward_pre_hook(lambda *_: seen.append(pending(model)))
        with torch.no_grad():
            first, again = model(draw(0, 2, 4, 8)), model(draw(0, 2, 4, 8))
        assert torch.equal(first, again)

    seen: list[list[str]] = []
    run(body, 2)
    assert seen == [[]] * 4


@pytest.mark.parametrize("keep", ["view", "numpy", "state_dict"])
def test_memory_that_others_look_at_is_filled_inside_the_step(keep: str) -> None:
    def body(transport: Transport) -> None:
        model, optimizer = wrap(transport)
        weight = model.module[0].weight
        views: dict[str, Callable[[torch.Tensor], Any]] = {
            "view": lambda weight: weight.detach()[3:7],
            "numpy": lambda weight: weight.detach().numpy(),
            "state_dict": lambda _: model.state_dict()["module.0.weight"],
        }
        kept = views[keep](weight)
        for number in range(2):
            update(model, optimizer, 10 * number + transport.rank)
            assert "0.weight" not in pending(model)
            now = torch.as_tensor(kept).clone()
            assert torch.equal(now, weight[3:7] if keep == "view" else weight)
        del kept, weight
        gc.collect()
        update(model, optimizer, 20 + transport.rank)
        assert "0.weight" in pending(model)

    run(body, 2)


class Scale(nn.Module):
    """Autograd keeps the parameter itself, and no view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def test_a_backward_through_parameters_from_before_the_update_is_refused() -> None:
    """Also where the optimizer does not say that it has changed them, as fused ones do not."""

    def body(transport: Transport) -> None:
        model = DDP(nn.Sequential(Scale(), Scale(), Scale()), transport=transport, placement="zero1", timeout=20)
        optimizer = model.optimizer(torch.optim.AdamW, fused=True)
        loss = model(draw(transport.rank, 4, 8)).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        assert len(pending(model)) == 3
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run(body, 2)


@pytest.mark.usefixtures("small_pieces")
def test_parameters_of_modules_that_run_as_a_whole_come_inside_the_step() -> None:
    def make_graphed_forward(forward: Any) -> Any:
        """As torch.cuda.make_graphed_callables replaces the forward of a module."""
        return lambda x: forward(x)

    def build() -> nn.Module:
        last = mlp(8, 300, 8)
        last[0].forward = make_graphed_forward(last[0].forward)
        return nn.Sequential(mlp(8, 300, 8), torch.jit.script(mlp(8, 300, 8)), last)

    def body(transport: Transport) -> list[str]:
        model, optimizer = wrap(transport, "zero1", nets[transport.rank])
        model(draw(transport.rank, 4, 8)).square().mean().backward()
        optimizer.step()
        found = pending(model)
        first, again = model(draw(0, 4, 8)), model(draw(0, 4, 8))
        assert torch.equal(first, again)
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is old
        warnings.simplefilter("ignore", FutureWarning)  # as torch 2.15 says it
        nets = [build() for _ in range(2)]
    found = run(body, 2)
    assert found == [["0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias", "2.2.weight", "2.2.bias"]] * 2


def test_a_module_that_was_replaced() -> None:
    """Its parameters are trained on by whoever has taken them over."""

    def body(placement: str) -> Callable[[Transport], Values]:
        def train(transport: Transport) -> Values:
            model, optimizer = wrap(transport, placement)
            params = list(model.parameters())
            for step in range(4):
                if step == 2:
                    other = nn.Linear(300, 200)
                    other.weight, other.bias = model.module[2].weight, model.module[2].bias
                    model.module[2] = other
                update(model, optimizer, 10 * step + transport.rank)
            return [param.detach().clone() for param in params]

        return train

    plain = run(body("ddp"), 2)[0]
    for found in run(body("zero1"), 2):
        assert_equal(found, plain)


def test_two_optimizers_of_one_replica() -> None:
    def body(placement: str) -> Callable[[Transport], Values]:
        def train(transport: Transport) -> Values:
            model = DDP(mlp(*WIDTHS), transport=transport, placement=placement, timeout=20)
            params = list(model.parameters())
            both = [model.optimizer(torch.optim.AdamW, some, lr=0.01) for some in (params[:3], params[3:])]
            for step in range(3):
                model(draw(10 * step + transport.rank, 4, 8)).square().mean().backward()
                for optimizer in both:
                    optimizer.step()
                model.zero_grad()
            return [param.detach().clone() for param in params]

        return train

    plain = run(body("ddp"), 2)[0]
    for found in run(body("zero1"), 2):
        assert_equal(found, plain)


def test_a_rank_that_is_gone_is_named_by_whoever_waits() -> None:
    gone = threading.Event()

    def body(transport: Transport) -> None:
        model, optimizer = wrap(transport)
        model(draw(transport.rank, 4, 8)).square().mean().backward()
        if transport.rank:
            gone.set()
            raise ZeroDivisionError("of the test")
        assert gone.wait(20)
        optimizer.step()
        for _ in range(2):  # the values will never come
            with pytest.raises(PeerLost, match="rank 1"):
                model(draw(0, 4, 8))
            with pytest.raises(PeerLost, match="rank 1"):
                model.module[0].weight.sum()
        assert isinstance(model.module[0].weight, PendingParameter)
        with pytest.raises(PeerLost):
            optimizer.step()

    with pytest.raises(ZeroDivisionError):
        run(body, 2)


def test_a_replica_is_let_go_of_right_after_its_last_step() -> None:
    def body(transport: Transport) -> nn.Module:
        model, optimizer = wrap(transport)
        update(model, optimizer, transport.rank)
        assert len(pending(model)) == 8
        if transport.rank:
            model._closing()  # which Python calls when nobody has the replica any more
            assert pending(model) == []
        net: nn.Module = model.module
        return net

    nets = run(body, 2)
    gc.collect()
    for net in nets:
        assert_equal([param.detach() for param in net.parameters()], expected())
        assert all(not layer._forward_pre_hooks for layer in net.modules())
