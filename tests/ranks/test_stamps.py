"""What stamps say of what travels: its kind, its bytes, and in which generation of the group."""

from typing import Any

import pytest
import torch
from torch import nn

from paceline.collectives import Transport
from paceline.collectives.threads import run
from paceline.observe.timeline import SpanKind, read_timeline
from paceline.trace import Moment, Stamp
from paceline.traffic import Collective, CollectiveKind
from tests.models import DDP, Branches, draw, mlp

ONE_EACH = 1e-6  # MiB: a bucket per parameter
OF_COLLECTIVES = {Moment.LAUNCHED, Moment.COMPLETED, Moment.WAIT_ENTERED, Moment.WAIT_LEFT}
GATHERS = {Moment.LAUNCHED, Moment.WAIT_ENTERED, Moment.WAIT_LEFT}


def by_collective(model: Any) -> dict[Collective, list[Moment]]:
    found: dict[Collective, list[Moment]] = {}
    for stamp in model.trace.stamps():
        assert (stamp.collective is not None) == (stamp.moment in OF_COLLECTIVES), stamp
        if stamp.collective is not None:
            found.setdefault(stamp.collective, []).append(stamp.moment)
    return found


def of_kind(model: Any, kind: CollectiveKind) -> list[Stamp]:
    return [stamp for stamp in model.trace.stamps() if stamp.collective is not None and stamp.collective.kind is kind]


def step(model: Any, optimizer: Any, seed: int) -> None:
    model(draw(seed, 4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_buckets_say_their_kind_and_their_bytes() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(8, 16, 4), transport=transport, bucket_cap_mb=ONE_EACH)
        model(draw(transport.rank, 4, 8)).sum().backward()
        stamps = of_kind(model, CollectiveKind.ALL_REDUCE)
        sizes = {stamp.bucket: stamp.collective.nbytes for stamp in stamps if stamp.collective is not None}
        assert sizes == {bucket.index: bucket.nbytes for bucket in model.layout.buckets}
        assert {stamp.moment for stamp in stamps} == OF_COLLECTIVES
        assert len(stamps) == 4 * len(sizes)

    run(body, 2)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.words(x)
        return found


def test_sparse_gradients_say_what_they_bring() -> None:
    def body(transport: Transport) -> None:
        model = DDP(Words(), transport=transport)
        model(torch.arange(5)).sum().backward()
        (launched,) = [one for one in of_kind(model, CollectiveKind.ALL_REDUCE) if one.moment is Moment.LAUNCHED]
        assert launched.collective is not None
        assert launched.collective.nbytes == 5 * 8 + 5 * 3 * 4, "the numbers of rows, and the rows"

    run(body, 2)


def test_a_bucket_that_is_left_out_does_not_travel() -> None:
    def body(transport: Transport) -> None:
        model = DDP(Branches(), transport=transport, bucket_cap_mb=ONE_EACH, skip_all_reduce_unused_params=True)
        model(draw(transport.rank, 2, 3), "t").sum().backward()
        launched = [stamp for stamp in model.trace.stamps() if stamp.moment is Moment.LAUNCHED]
        assert len(launched) == 6
        assert sum(stamp.collective is not None for stamp in launched) == 2

    run(body, 2)


@pytest.mark.parametrize("placement", ["zero1", "zero2"])
def test_gathers_of_updated_parameters_are_stamped(placement: str) -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(8, 16, 4), transport=transport, placement=placement)
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        for number in range(2):
            step(model, optimizer, 10 * number + transport.rank)
        model(draw(0, 4, 8))  # whoever uses the parameters has waited for them
        gathers = {
            what: moments for what, moments in by_collective(model).items() if what.kind is CollectiveKind.GATHER
        }
        nbytes = sum(param.nbytes for param in model.module.parameters())
        assert sum(what.nbytes for what in gathers) == nbytes
        assert [what.of for what in gathers] == ["0.weight to 2.bias"]
        in_turn = [Moment.LAUNCHED, Moment.WAIT_ENTERED, Moment.WAIT_LEFT]
        assert all(moments == 2 * in_turn for moments in gathers.values())
        assert {stamp.bucket for stamp in of_kind(model, CollectiveKind.GATHER)} == {-1}
        scattered = of_kind(model, CollectiveKind.REDUCE_SCATTER)
        assert {stamp.bucket for stamp in scattered} == {bucket.index for bucket in model.layout.buckets}
        assert not of_kind(model, CollectiveKind.ALL_REDUCE)

    run(body, 2)


class Blocks(nn.Module):
    """Two blocks, which become units, and the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found


def test_units_are_stamped_whenever_they_are_gathered() -> None:
    def body(transport: Transport) -> None:
        model = DDP(Blocks(), transport=transport, placement="zero3")
        optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
        step(model, optimizer, transport.rank)
        gathers = {
            what.of: moments for what, moments in by_collective(model).items() if what.kind is CollectiveKind.GATHER
        }
        assert set(gathers) == {"blocks.0", "blocks.1", "the root of the model"}
        for name, moments in gathers.items():
            times = 1 if "root" in name else 2  # for forward, and again for backward
            assert all(moments.count(moment) == times for moment in GATHERS), (name, moments)
        whats = {stamp.collective for stamp in of_kind(model, CollectiveKind.GATHER)}
        (size,) = [what.nbytes for what in whats if what is not None and what.of == "blocks.0"]
        assert size == (8 * 8 + 8) * 4
        spans = read_timeline(model.trace.stamps())
        assert any(span.kind is SpanKind.EXPOSED and span.bucket == -1 for span in spans)

    run(body, 2)


def test_no_times_of_a_device_where_the_host_computes() -> None:
    def body(transport: Transport) -> None:
        model = DDP(mlp(8, 4), transport=transport)
        model.trace.device_times = True
        model(draw(transport.rank, 4, 8)).sum().backward()
        assert of_kind(model, CollectiveKind.ALL_REDUCE)
        assert all(stamp.device is None for stamp in model.trace.stamps())

    run(body, 2)
