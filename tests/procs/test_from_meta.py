"""Models that begin on the meta device: values come from reset_parameters() or a file, and no rank holds the whole."""

import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import paceline
from paceline.checkpoint import Checkpointer, digest
from tests.models import draw
from tests.pool import Pool

PLACEMENTS = ("ddp", "zero1", "zero2", "zero3")
WIDTH = 96


class Positions(nn.Module):
    """Makes its buffer anew when it is reset."""

    def __init__(self) -> None:
        super().__init__()
        self.shift: torch.Tensor
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH, device="cpu"), persistent=False)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.norm(self.linear(x)).relu()


class Net(nn.Module):
    """Blocks between an embedding and a head that share a weight."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.positions = Positions()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.embed(tokens) + self.positions.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Scale(nn.Module):
    """Has nothing that sets its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.shift: torch.Tensor
        self.register_buffer("shift", torch.ones(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return x @ self.factor + self.shift


class Tied(nn.Module):
    """A block inside a unit has the weight of the root too, and comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = list(self.blocks.parameters())[2]

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


def wrap(net: nn.Module, placement: str, **arguments: Any) -> Any:
    return paceline.DistributedDataParallel(net, placement=placement, timeout=20, **arguments)


def held_bytes(net: nn.Module) -> int:
    """Of parameters that are there as a whole."""
    return sum(param.untyped_storage().nbytes() for param in net.parameters() if type(param) is nn.Parameter)


def start(rank: int, size: int, placement: str, transport: str, shard: int | None) -> tuple[str, int, int]:
    """The digest of the whole state, the most bytes that were there at a time, and those of the whole."""
    torch.manual_seed(7 + rank)
    net, most = on_meta(Net), [0]
    whole = sum(param.nbytes for param in net.parameters())
    linears: list[Any] = [module for module in net.modules() if isinstance(module, nn.Linear)]
    for linear in linears:

        def reset(inner: nn.Linear = linear) -> None:
            nn.Linear.reset_parameters(inner)
            most[0] = max(most[0], held_bytes(net))

        linear.reset_parameters = reset
    model = wrap(net, placement, transport=transport, shard=shard)
    assert net.head.weight is net.embed.weight
    found = digest(model, None, 0)
    optimizer = model.optimizer(torch.optim.AdamW, lr=0.01)
    tokens = torch.randint(50, (4,), generator=torch.Generator().manual_seed(rank))
    model(tokens).float().logsumexp(-1).mean().backward()
    optimizer.step()
    return found, most[0], whole


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_every_placement_and_world_starts_with_the_same_values(procs: Pool, transport: str) -> None:
    expected = procs(2).run(start, "ddp", transport, None)
    assert len({found for found, _, _ in expected}) == 1
    for ranks, placement, shard in ((2, "zero1", None), (2, "zero3", None), (4, "zero3", 2)):
        for found, most, whole in procs(ranks).run(start, placement, transport, shard):
            assert found == expected[0][0]
            assert placement != "zero3" or most < 0.4 * whole  # the root and one block


def load(rank: int, size: int, placement: str, file: str, folder: str) -> list[str]:
    """What is loaded from one file, and from a checkpoint that was made of it."""
    net = on_meta(lambda: nn.Sequential(nn.Linear(9, WIDTH), Scale(), nn.Linear(WIDTH, 5)))
    found = []
    try:
        wrap(net, placement)(draw(rank, 4, 9))
    except paceline.errors.UsageError as error:
        found.append(str(error))
    net = on_meta(lambda: nn.Sequential(nn.Linear(9, WIDTH), Scale(), nn.Linear(WIDTH, 5)))
    net[1].shift = torch.ones(WIDTH)
    model = wrap(net, placement)
    model.module.load_state_dict(safetensors.torch.load_file(file))
    model(draw(rank, 4, 9)).sum().backward()
    with Checkpointer(folder, asynchronous=False) as checkpointer:
        assert checkpointer.save(1, model=model).problem is None
    net = on_meta(lambda: nn.Sequential(nn.Linear(9, WIDTH), Scale(), nn.Linear(WIDTH, 5)))
    net[1].shift = torch.ones(WIDTH)
    again = wrap(net, placement)
    Checkpointer(folder).load(model=again)
    again(draw(rank, 4, 9)).sum().backward()
    return [*found, digest(model, None, 0), digest(again, None, 0)]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_nothing_sets_must_be_loaded(procs: Pool, placement: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, WIDTH), Scale(), nn.Linear(WIDTH, 5))
    safetensors.torch.save_file(net.state_dict(), tmp_path / "net.safetensors")
    for error, *digests in procs(2).run(load, placement, str(tmp_path / "net.safetensors"), str(tmp_path / "saved")):
        assert "began on the meta device and has no values: Scale has no reset_parameters()" in error
        assert re.search(r"1\.(factor|shift)", error)
        assert digests == [digest(net, None, 0)] * 2


def load_state(rank: int, size: int) -> tuple[float, bool]:
    """What of the parameters was there at most, as a part of all, and whether all of it was loaded."""
    net, most = on_meta(Net), [0]
    model = wrap(net, "zero3")
    torch.manual_seed(3)
    saved = {name: torch.randn_like(value.float()) for name, value in Net().state_dict().items()}
    saved["head.weight"] = saved["embed.weight"]
    for module in net.modules():
        module.register_load_state_dict_pre_hook(lambda *_: most.append(held_bytes(net)))
    model.module.load_state_dict(saved)
    with model.whole():
        equal = all(torch.equal(param, saved[name]) for name, param in net.named_parameters())
        return max(most) / held_bytes(net), equal


def test_a_state_is_loaded_unit_by_unit(procs: Pool) -> None:
    for most, equal in procs(2).run(load_state):
        assert equal and most < 0.4


def start_differently(rank: int, size: int, placement: str) -> None:
    wrap(on_meta(Net) if rank else Net(), placement)


@pytest.mark.parametrize("placement", ["ddp", "zero3"])
def test_all_ranks_begin_on_meta_or_none(procs: Pool, placement: str) -> None:
    for outcome in procs(2).attempt(start_differently, placement):
        assert isinstance(outcome.error, paceline.errors.ModelMismatch)
        assert "embed.weight has device not meta on rank 0 and meta on rank 1" in str(outcome.error)


def start_in_parts(rank: int, size: int, placement: str) -> tuple[bool, bool]:
    """A block that is there keeps its values, and one that is on meta gets some."""
    torch.manual_seed(0)
    net: Any = Net(2)
    with torch.device("meta"):
        net.blocks[1] = Block()
    before = net.blocks[0].linear.weight.detach().clone()
    model = wrap(net, placement)
    with model.whole():
        weights = [block.linear.weight.detach() for block in net.blocks]
        return torch.equal(weights[0], before), bool(weights[1].isfinite().all() and weights[1].std() > 0.01)


@pytest.mark.parametrize("placement", ["zero2", "zero3"])
def test_parts_of_a_model_begin_on_meta(procs: Pool, placement: str) -> None:
    assert procs(3).run(start_in_parts, placement) == [(True, True)] * 3


def start_tied(rank: int, size: int, placement: str) -> str:
    torch.manual_seed(2)
    model = wrap(on_meta(Tied), placement)
    found = digest(model, None, 0)
    model(draw(rank, 4, WIDTH)).sum().backward()
    return found


def test_shared_parameters_have_the_same_values_under_every_placement(procs: Pool) -> None:
    found = [procs(2).run(start_tied, placement) for placement in PLACEMENTS]
    assert all(digests == [found[0][0]] * 2 for digests in found)


def start_outside_of_shards(rank: int, size: int) -> list[str]:
    """A module that PyTorch resets by another name, and one whose parameters are frozen."""
    torch.manual_seed(rank)
    found = []
    for placement in ("zero1", "zero3"):
        net = on_meta(lambda: nn.Sequential(nn.MultiheadAttention(16, 2), nn.Linear(16, 16), nn.BatchNorm1d(16)))
        net[1].requires_grad_(requires_grad=False)
        model = wrap(net, placement)
        with model.whole():
            assert all(bool(param.isfinite().all()) for param in net.parameters())
            assert float(net[1].weight.std()) > 0.05 and float(net[2].running_var.min()) == 1.0
        found.append(digest(model, None, 0))
    return found


def test_frozen_parameters_and_buffers(procs: Pool) -> None:
    first, *others = procs(3).run(start_outside_of_shards)
    assert all(other == first for other in others)
