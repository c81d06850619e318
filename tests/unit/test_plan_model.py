"""The plan of a model at hand: what is followed, what is left untouched, what is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody knows)
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.bare import bare
from paceline.bench.gpt import BenchGPT
from paceline.bench.spec import GPTShape
from paceline.memory_plan.closed_form import PlanSettings
from paceline.memory_plan.numbers import PlanError
from paceline.memory_plan.of_model import plan
from paceline.memory_plan.rank_memory import LIBRARY_BYTES
from paceline.train import model as trained
from paceline.train.sizes import Shape

SHAPE = GPTShape(vocabulary=512, width=64, layers=3, heads=4, context=32)


def gpt(device: str = "meta") -> BenchGPT:
    with torch.device(device):
        return BenchGPT(SHAPE)


def text(batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.zeros(batch, SHAPE.context, dtype=torch.long)
    return tokens, tokens


def sizes(found: Any) -> dict[str, int]:
    return {line.name: line.nbytes for line in found.lines}


@pytest.mark.parametrize("dtype", ["float32", "bf16", "bf16-pure"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_followed_gpt_agrees_with_the_closed_form(dtype: str, checkpointing: bool) -> None:
    shape = Shape(layers=3, width=64, heads=4, context=32)
    with torch.device("meta"):
        model = trained.GPT(shape, 512, checkpointing=checkpointing)
    followed = plan(model, text(16), dtype=dtype, ranks=(1, 2))
    formula = PlanSettings(
        params=followed.parameters,
        batch=16,
        seq=32,
        vocab=512,
        layers=3,
        width=64,
        heads=4,
        dtype=dtype,
        ranks=(1, 2),
        device="cpu",
        checkpointing=checkpointing,
    ).plan()
    # Without the constant that both share.
    for one, other in zip(followed.by_ranks, formula.by_ranks, strict=True):
        assert one.total - LIBRARY_BYTES == pytest.approx(other.total - LIBRARY_BYTES, rel=0.05)


def test_activations_of_a_perceptron_are_counted_to_the_byte() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    found = plan(model, (torch.zeros(32, 8), torch.zeros(32, 4)), loss=F.mse_loss, optimizer="sgd")
    # Kept: the result of relu (linear's own is freed); at the loss: the result, the loss, its gradient and one more.
    lines = sizes(found)
    assert lines["parameters"] == 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert lines["activations"] == 4 * 32 * 16
    assert lines["batch"] == 4 * 32 * (8 + 4)


def test_nothing_is_touched() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    batch = (torch.zeros(4, 8), torch.zeros(4, 2))
    plan(model, batch, loss=F.mse_loss, device_memory=2**30)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None and type(param) is nn.Parameter for param in model.parameters())
    assert model.training
    assert all(not param._post_accumulate_grad_hooks for param in model.parameters())


def test_gradients_that_wait_for_the_step_stay_as_they_are() -> None:
    model = nn.Linear(4, 1)
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
    before = model.weight.grad.clone()
    plan(model, torch.ones(2, 4), loss=torch.sum)
    assert torch.equal(model.weight.grad, before)


class Checkpointed(nn.Module):
    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.kept = kept
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (block(x) if self.kept else checkpoint(block, x, use_reentrant=False))
        return x.square().mean()


def test_checkpointing_is_seen() -> None:
    batch = torch.zeros(2048, 64)
    recomputed, kept = (sizes(plan(Checkpointed(kept), batch)) for kept in (False, True))
    # A block keeps its input, its hidden layer before and after the activation function, and its result.
    assert recomputed["activations"] < 0.3 * kept["activations"]


def test_weights_held_in_lists_are_followed_too() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 16, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.rnn(x)[0]
            return result.mean()

    model = Recurrent()
    found = plan(model, torch.zeros(4, 5, 8))
    assert found.total > 0
    assert all(param.grad is None for param in model.parameters())


def test_a_mapping_is_a_batch_and_its_loss_may_be_in_a_mapping() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, *, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.inner(inputs)
            return {"logits": logits, "loss": F.cross_entropy(logits, labels)}

    found = plan(Named(), {"inputs": torch.zeros(8, 4), "labels": torch.zeros(8, dtype=torch.long)})
    assert found.batch == 8
    assert sizes(found)["logits and loss"] > 0


def test_autocast_copies_of_weights_have_a_line() -> None:
    lines = sizes(plan(gpt(), text(8), dtype="bf16"))
    # Biases are copied too, but backward does not need them.
    assert lines["weights in bfloat16"] == 2 * (512 * 64 + 3 * 12 * 64 * 64)
    assert sizes(plan(gpt(), text(8)))["activations"] > lines["activations"]


def test_frozen_parameters_have_neither_gradients_nor_states() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 1))
    model[0].requires_grad_(False)
    found = plan(model, torch.zeros(2, 16), loss=torch.sum, ranks=2)
    update = next(moment for moment in found.by_ranks[0].moments if moment.name == "optimizer step")
    lines = {line.name: line.nbytes for line in update.lines}
    assert lines["parameters"] == 4 * (16 * 16 + 16 + 17)
    assert lines["gradients"] == lines["m"] == 4 * 17


def test_optimizers_at_hand_are_read() -> None:
    model = nn.Linear(256, 256)
    batch = torch.zeros(1, 256)
    fused = plan(model, batch, loss=torch.sum, optimizer=torch.optim.AdamW(model.parameters(), fused=True))
    assert "adamw (fused)" in fused.subject
    plain = plan(model, batch, loss=torch.sum, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert "sgd-momentum (loop)" in plain.subject
    assert sizes(plain)["momentum"] == 4 * (256 * 256 + 256)
    with pytest.raises(PlanError, match="optimizer='adadelta': expected one of adamw"):
        plan(model, batch, loss=torch.sum, optimizer=torch.optim.Adadelta(model.parameters()))


def test_the_largest_batch_is_that_of_following_it_again() -> None:
    room = plan(gpt(), text(4), device="cuda").by_ranks[0].total_with_outside + 20 * 2**20
    found = plan(gpt(), text(4), device="cuda", device_memory=room)
    largest = found.largest_batch
    assert largest is not None and largest > 4
    assert plan(gpt(), text(largest), device="cuda").fits(room)
    assert not plan(gpt(), text(largest + 1), device="cuda").fits(room)


def test_without_a_batch_the_states_are_planned() -> None:
    found = plan(gpt(), optimizer="adamw", fused=True)
    assert found.total >= 16 * found.parameters
    assert "activations are not included" in str(found)


def test_wrapped_models_are_unwrapped() -> None:
    model = nn.Linear(2, 2)
    compiled = nn.Module()
    compiled._orig_mod = model  # as torch.compile does
    assert bare(compiled) is model


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match="plan\\(\\) has no argument rank; expected ranks, accumulate, lanes"):
        plan(nn.Linear(2, 2), rank=2)


class Curious(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x).sum()
        return result * 2 if result.item() > 0 else result


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": nn.ReLU()}, "model: expected a module with parameters, ReLU has none"),
        ({"dtype": "int4"}, "dtype='int4': expected one of float32"),
        ({"optimizer": "adan"}, "optimizer='adan'"),
        ({"device": "tpu"}, "device='tpu': expected one of cpu, cuda"),
        ({"ranks": -1}, "ranks=-1"),
        ({"foreach": True, "fused": True}, "foreach=True and fused=True"),
        ({"device_memory": 0}, "device_memory=0"),
        ({"batch": ("no tensor",)}, "batch: expected a tensor"),
        ({"loss": None}, "expected the model to return its loss, one number, got [2, 4]: pass loss="),
        ({"batch": torch.zeros(2, 9)}, "could not be followed without memory: RuntimeError"),
        ({"model": Curious(), "loss": None}, "could not be followed without memory: DataDependentOutputException"),
        ({"model": nn.Linear(4, 4).double()}, "the parameters are torch.float64"),
    ],
)
def test_bad_input(given: dict[str, Any], words: str) -> None:
    settings: dict[str, Any] = {"model": nn.Linear(4, 4), "batch": torch.zeros(2, 4), "loss": torch.sum}
    with pytest.raises(PlanError) as caught:
        plan(**{**settings, **given})
    assert words in str(caught.value)
