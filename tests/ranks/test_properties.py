"""For any shapes, ranks, buckets and unused parameters: gradients are the mean, and equal on every rank."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.collectives import Transport
from paceline.collectives.threads import run
from tests.models import DDP, Grads, assert_same_bits, draw, grads, mean_grads, mlp

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@dataclass(frozen=True)
class Job:
    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    used: list[list[set[int]]]  # parameters that each rank uses in each step
    cap_mib: float
    overlap: bool

    def build(self) -> nn.ParameterList:
        numbered = enumerate(zip(self.shapes, self.dtypes, strict=True))
        return nn.ParameterList(nn.Parameter(draw(index, *shape).to(dtype)) for index, (shape, dtype) in numbered)

    def loss(self, step: int, params: nn.ParameterList, rank: int) -> torch.Tensor:
        total = torch.zeros(())
        for index in sorted(self.used[step][rank], key=lambda index: (index * 7 + step) % len(self.shapes)):
            factor = draw(1000 * step + 10 * rank + index, *self.shapes[index])
            total = total + (params[index].square() * factor).sum().float()
        return total


@st.composite
def jobs(draw_from: st.DrawFn) -> Job:
    count = draw_from(st.integers(1, 6))
    shapes = [tuple(draw_from(st.lists(st.integers(0, 5), max_size=3))) for _ in range(count)]
    dtypes = [draw_from(st.sampled_from(DTYPES)) for _ in range(count)]
    size = draw_from(st.integers(1, 4))
    # A rank that uses nothing joins at its optimizer step, which is another test: here everyone uses something.
    sets = st.sets(st.integers(0, count - 1), min_size=1)
    used = [[draw_from(sets) for _ in range(size)] for _ in range(draw_from(st.integers(1, 3)))]
    return Job(shapes, dtypes, used, draw_from(st.sampled_from([1e-6, 1e-4, 2e-4, 25])), draw_from(st.booleans()))


class Lost(nn.Module):
    """Holds parameters for a loss that is computed outside of it."""

    def __init__(self, params: nn.ParameterList) -> None:
        super().__init__()
        self.params = params


@settings(max_examples=60)
@given(job=jobs())
def test_gradients_are_the_mean_in_rank_order(job: Job) -> None:
    size = len(job.used[0])

    def body(transport: Transport) -> list[Grads]:
        model = DDP(Lost(job.build()), transport=transport, bucket_cap_mb=job.cap_mib, overlap=job.overlap)
        results = []
        for step in range(len(job.used)):
            model.zero_grad()
            job.loss(step, model.module.params, transport.rank).backward()
            model.sync_gradients()
            results.append(grads(model.module.params))
        return results

    wanted = [mean_grads(job.build(), partial(job.loss, step), size) for step in range(len(job.used))]
    everything = run(body, size)
    for results in everything:
        for got, expected in zip(results, wanted, strict=True):
            assert_same_bits(got, expected)


@settings(max_examples=25)
@given(
    widths=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    size=st.integers(1, 4),
    cap=st.sampled_from([1e-6, 1e-4, 25]),
    microbatches=st.integers(1, 3),
    learn=st.booleans(),
)
def test_any_mlp_accumulates_to_the_mean(
    widths: list[int], size: int, cap: float, microbatches: int, learn: bool
) -> None:
    def loss(model: nn.Module, rank: int, microbatch: int) -> torch.Tensor:
        out: torch.Tensor = model(draw(10 * rank + microbatch, 3, widths[0])).square().sum()
        return out

    def body(transport: Transport) -> Grads:
        model = DDP(mlp(*widths), transport=transport, bucket_cap_mb=cap)
        if learn:
            loss(model, transport.rank, 0).backward()
            model.zero_grad()
        with model.no_sync():
            for microbatch in range(microbatches - 1):
                loss(model, transport.rank, microbatch).backward()
        loss(model, transport.rank, microbatches - 1).backward()
        return grads(model)

    def all_micros(module: nn.Module, rank: int) -> torch.Tensor:
        for microbatch in range(microbatches - 1):
            loss(module, rank, microbatch).backward()
        return loss(module, rank, microbatches - 1)

    expected = mean_grads(mlp(*widths), all_micros, size)
    for got in run(body, size):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_the_bits_do_not_depend_on_the_buckets(size: int) -> None:
    def train(cap: float, transport: Transport) -> Grads:
        model = DDP(mlp(3, 7, 5, 2), transport=transport, bucket_cap_mb=cap)
        for step in range(2):
            model.zero_grad()
            model(draw(10 * step + transport.rank, 4, 3)).square().sum().backward()
        return grads(model)

    results = [run(partial(train, cap), size) for cap in (1e-6, 1e-4, 25)]
    for ranks in results:
        for got in ranks:
            assert_same_bits(got, results[0][0])
