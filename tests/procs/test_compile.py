"""torch.compile around, inside and across a replica: as many graphs and breaks as with torch's class, and no warnings.

Counted for both classes in the same process. Numbers of our own would change with every release of torch.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

from paceline.errors import UsageError
from tests.models import DDP, assert_close, draw, mlp, packed, seeded, unpacked, values
from tests.pool import Pool

TorchDDP: Any = nn.parallel.DistributedDataParallel
compiled_by: Any = torch.compile  # hardly typed
Step = Callable[[torch.Tensor], Any]


class Net(nn.Module):
    """Dynamo compiles the forward of modules that are not torch's own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


def net() -> nn.Module:
    return Net(mlp(3, 8, 2))


class Counts:
    """A backend that compiles nothing, and what Dynamo counts by itself."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.graphs: list[int] = []  # the nodes of each
        self.warnings: set[str] = set()

    def backend(self, graph: Any, _: Any) -> Any:
        self.graphs.append(len(graph.graph.nodes))
        return graph.forward

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Hold back warnings: torch has some of its own, with either class."""
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            yield
        self.warnings |= {str(one.message).partition("\n")[0] for one in heard}

    def told(self) -> dict[str, Any]:
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        return {"graphs": self.graphs, "breaks": breaks, "warnings": sorted(self.warnings)}


def around(model: Any, optimizer: Any, backend: Any) -> Step:
    compiled = compiled_by(model, backend=backend)

    def step(x: torch.Tensor) -> None:
        compiled(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def in_place(model: Any, optimizer: Any, backend: Any) -> Step:
    model.compile(backend=backend)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def inside(model: Any, optimizer: Any, backend: Any) -> Step:
    model.module = compiled_by(model.module, backend=backend)

    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_the_loss(model: Any, optimizer: Any, backend: Any) -> Step:
    @torch.compile(backend=backend)
    def loss(x: torch.Tensor) -> Any:
        return model(x).square().mean()

    def step(x: torch.Tensor) -> None:
        loss(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_the_backward(model: Any, optimizer: Any, backend: Any) -> Step:
    @torch.compile(backend=backend)
    def forward_and_backward(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    def step(x: torch.Tensor) -> None:
        forward_and_backward(x)
        optimizer.step()
        optimizer.zero_grad()

    return step


def accumulating(model: Any, optimizer: Any, backend: Any) -> Step:
    compiled = compiled_by(model, backend=backend)

    def step(x: torch.Tensor) -> None:
        with model.no_sync():
            compiled(x).square().mean().backward()
        compiled(2 * x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_a_closure(model: Any, optimizer: Any, backend: Any) -> Step:
    compiled = compiled_by(model, backend=backend)

    def step(x: torch.Tensor) -> None:
        def closure() -> Any:
            loss = compiled(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()

    return step


WAYS = [around, in_place, inside, with_the_loss, with_the_backward, accumulating, with_a_closure]
BY_NAME = {way.__name__: way for way in WAYS}


def count(wrapped: Any, way: str, rank: int, width: int = 3) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    counts = Counts()
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    step = BY_NAME[way](wrapped, optimizer, counts.backend)
    with counts.listening():
        for number in range(4):
            step(draw(10 * number + rank, 2, width))
    return counts.told(), values(getattr(wrapped.module, "_orig_mod", wrapped.module))


def both(rank: int, _: int, way: str) -> tuple[dict[str, Any], dict[str, Any], bytes, bytes]:
    theirs, expected = count(TorchDDP(net()), way, rank)
    ours, got = count(DDP(net(), timeout=20), way, rank)
    return ours, theirs, packed(got), packed(expected)


@pytest.mark.parametrize("way", BY_NAME)
def test_as_many_graphs_and_breaks_as_with_torchs_class(procs: Pool, way: str) -> None:
    for ours, theirs, got, expected in procs(2).run(both, way, deadline_s=60):
        assert ours == theirs
        assert ours["graphs"]
        assert_close(unpacked(got), unpacked(expected))


def split(rank: int, _: int) -> tuple[dict[str, Any], dict[str, Any]]:
    wide = [Net(*(nn.Linear(600, 600, bias=False) for _ in range(6))) for _ in range(2)]
    theirs, _values = count(TorchDDP(wide[0], bucket_cap_mb=2), "around", rank, width=600)
    ours, _values = count(DDP(wide[1], bucket_cap_mb=2, timeout=20), "around", rank, width=600)
    return ours, theirs


def test_graphs_are_split_at_buckets_as_with_torchs_class(procs: Pool) -> None:
    for ours, theirs in procs(2).run(split, deadline_s=60):
        assert ours == theirs
        assert len(ours["graphs"]) > 1


def whole_graphs(rank: int, _: int) -> list[tuple[str, str]]:
    found = []
    for kind in (TorchDDP, DDP):
        torch._dynamo.reset()
        model = kind(net())
        try:
            compiled_by(model, backend="eager", fullgraph=True)(draw(rank, 2, 3))
        except torch._dynamo.exc.Unsupported as error:
            found.append((type(error).__name__, "in forward" if ", in forward" in str(error) else str(error)))
    return found


def test_a_whole_graph_is_refused_as_with_torchs_class(procs: Pool) -> None:
    for theirs, ours in procs(2).run(whole_graphs, deadline_s=60):
        assert ours == theirs


def lanes(rank: int, _: int, compiles: bool) -> tuple[bytes, dict[str, Any]]:
    module = Net(seeded(nn.Linear(3, 4)), nn.Dropout(0.5))
    model = DDP(module, lanes=4, timeout=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = Counts()
    called = compiled_by(model, backend=counts.backend) if compiles else model
    for step in range(3):
        for x in model.lanes([draw(10 * step + lane, 2, 3) for lane in model.own_lanes], step):
            called(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return packed(values(module)), counts.told()


def test_lanes(procs: Pool) -> None:
    for (got, told), (expected, _) in zip(procs(2).run(lanes, True), procs(2).run(lanes, False), strict=True):
        assert_close(unpacked(got), unpacked(expected))
        assert len(told["graphs"]) == 1


# ------------------------------------------------------------------------------------------------------------ the user


@contextlib.contextmanager
def doubled(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield 2 * x


def of_users(rank: int, _: int) -> list[str]:
    """What users call around a replica, and what it calls of theirs, is compiled as ever."""
    model = DDP(net(), timeout=20)
    compiling: list[str] = []

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    counts = Counts()

    @torch.compile(backend=counts.backend)
    def train(x: torch.Tensor) -> None:
        with doubled(x) as twice:
            y = twice.sin()
        model(y).sum().backward()

    with counts.listening():
        for step in range(3):
            train(draw(step, 2, 3))

    @torch.compile(backend="eager", fullgraph=True)
    def whole(x: torch.Tensor) -> torch.Tensor:
        with doubled(x) as twice:
            compiling.append(str(torch.compiler.is_compiling()))
            return twice.sin()

    whole(draw(rank, 2, 3))
    return [*compiling, str(len(counts.graphs))]


def test_code_of_users_is_compiled_as_ever(procs: Pool) -> None:
    for compiling, graphs in procs(2).run(of_users, deadline_s=60):
        assert compiling == "True"
        assert int(graphs) >= 2  # before the model, and the model


# ------------------------------------------------------------------------------------------------ compiled autograd


def under_compiled_autograd(rank: int, _: int, where: str) -> str:
    from torch._dynamo import compiled_autograd

    model = DDP(net(), timeout=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = values(model)

    def whole(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    def only_backward(x: torch.Tensor) -> None:
        loss = model(x).square().mean()
        with compiled_autograd._enable(compiled_by(backend="eager")):
            loss.backward()

    with Counts().listening(), torch._dynamo.config.patch(compiled_autograd=where == "in the whole step"):
        run = compiled_by(whole, backend="eager") if where == "in the whole step" else only_backward
        with pytest.raises(UsageError) as caught:
            run(draw(rank, 2, 3))
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())
    optimizer.zero_grad()
    torch._dynamo.reset()
    model(draw(rank, 2, 3)).square().mean().backward()  # without it, training goes on
    optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize("where", ["in the whole step", "in backward"])
def test_compiled_autograd_is_refused_before_anything_trains(procs: Pool, where: str) -> None:
    for message in procs(2).run(under_compiled_autograd, where, deadline_s=60):
        assert "compiled autograd" in message


def by_the_python_reducer(rank: int, size: int) -> None:
    """`optimize_ddp="python_reducer"`: a compiled backward reduces, and the replica has no reducer of its own."""
    torch._dynamo.reset()
    batches = [draw(other, 4, 3) for other in range(size)]
    alone = seeded(net())
    for batch in batches:
        (alone(batch).sum() / size).backward()
    with warnings.catch_warnings(), torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        warnings.simplefilter("ignore")
        model = compiled_by(DDP(seeded(net())), backend="aot_eager")
        with torch._dynamo.compiled_autograd._enable(compiled_by(backend="aot_eager")):
            model(batches[rank]).sum().backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.timeout(120)
def test_a_compiled_backward_reduces_by_the_python_reducer(procs: Pool) -> None:
    procs(2).run(by_the_python_reducer)
