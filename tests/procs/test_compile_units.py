"""torch.compile where parameters are in units: as many graphs and breaks as with torch's fully_shard.

Counted for both in the same processes, as in test_compile.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.models import DDP, Grads, assert_same_bits, draw, packed, seeded, unpacked
from tests.pool import Pool
from tests.procs.test_compile import Counts

compiled_by: Any = torch.compile  # hardly typed


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 96), nn.Linear(96, 16)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Blocks one after another, in a loop, which Dynamo leaves alone where it has to break, or without one."""

    def __init__(self, loops: bool) -> None:
        super().__init__()
        self.first, self.last, self.loops = nn.Linear(8, 16), nn.Linear(16, 8), loops
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        seeded(self)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        if self.loops:
            for block in self.blocks:
                x = block(x)
        else:
            x = self.blocks[2](self.blocks[1](self.blocks[0](x)))
        return self.last(x)


Call = Callable[[torch.Tensor], Any]


def each_block(model: Any, net: Any, backend: Any) -> Call:
    for block in net.blocks:
        block.compile(backend=backend)
    return model  # type: ignore[no-any-return]


def around(model: Any, net: Any, backend: Any) -> Call:
    return compiled_by(model, backend=backend)  # type: ignore[no-any-return]


def in_place(model: Any, net: Any, backend: Any) -> Call:
    model.compile(backend=backend)
    return model  # type: ignore[no-any-return]


def inside(model: Any, net: Any, backend: Any) -> Call:
    if model is net:
        return around(model, net, backend)
    model.module = compiled_by(net, backend=backend)
    return model  # type: ignore[no-any-return]


def nothing(model: Any, net: Any, backend: Any) -> Call:
    return model  # type: ignore[no-any-return]


WAYS = {way.__name__: way for way in (each_block, around, in_place, inside, nothing)}
TRIED = {True: ("around",), False: ("each_block", "around", "in_place", "inside")}


def fully_sharded(net: Any) -> tuple[Any, Any]:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*net.blocks, net):
        fully_shard(part, mesh=mesh)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def in_units(net: Any, placement: str, transport: str) -> tuple[Any, Any]:
    model = DDP(net, placement=placement, transport=transport, bucket_plan="fixed", timeout=20)
    return model, model.optimizer(torch.optim.SGD, lr=0.1)


def count(net: Any, model: Any, optimizer: Any, way: str, rank: int) -> tuple[dict[str, Any], Grads]:
    counts = Counts()
    called = WAYS[way](model, net, counts.backend)
    with counts.listening():
        for number in range(3):
            called(draw(10 * rank + number, 4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            output = called(draw(99, 4, 8)).clone()
    told = counts.told()
    return {"graphs": told["graphs"], "breaks": told["breaks"]}, {"output": output}


def all_ways(rank: int, size: int, loops: bool, transport: str) -> list[tuple[str, Any, Any, bytes]]:
    found = []
    for way in TRIED[loops]:
        net: Any = Model(loops)
        theirs, _ = count(net, *fully_sharded(net), way, rank)
        net = Model(loops)
        ours, output = count(net, *in_units(net, "zero3", transport), way, rank)
        found.append((way, ours, theirs, packed(output)))
    net = Model(loops)
    _, expected = count(net, *in_units(net, "ddp", transport), "nothing", rank)
    return [*found, ("ddp", {}, {}, packed(expected))]


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("loops", "transport"), [(True, "shm"), (False, "torch")])
def test_as_many_graphs_and_breaks_as_with_fully_shard(procs: Pool, loops: bool, transport: str) -> None:
    for *results, (_, _, _, expected) in procs(2).run(all_ways, loops, transport, deadline_s=120):
        for way, ours, theirs, output in results:
            assert ours == theirs, way
            assert ours["graphs"], way
            assert_same_bits(unpacked(output), unpacked(expected))
