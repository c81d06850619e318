"""The same training as torch's own class, on real processes over gloo: equal bits."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.models import DDP, GPT, assert_close, assert_same_bits, packed, tokens, unpacked, values
from tests.pool import Pool

TorchDDP: Any = nn.parallel.DistributedDataParallel
STEPS = 50
Result = tuple[bytes, list[float]]  # parameters and losses


def train(model: Any, rank: int, *, steps: int = STEPS, microbatches: int = 1) -> Result:
    """Parameters and losses after `steps` steps. Dropout draws from the seed of the rank."""
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        with model.no_sync():
            for microbatch in range(microbatches - 1):
                model(tokens(10_000 * microbatch + 100 * step + rank, 2, 16)).backward()
        loss = model(tokens(100 * step + rank, 2, 16))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return packed(values(model)), losses


def both(rank: int, size: int, dropout: float, settings: dict[str, Any], microbatches: int) -> tuple[Result, Result]:
    """Ours, then torch's. Small buckets, so that there are several."""
    ours = train(DDP(GPT(dropout=dropout), bucket_cap_mb=0.02, **settings), rank, microbatches=microbatches)
    torchs = train(TorchDDP(GPT(dropout=dropout), bucket_cap_mb=0.02), rank, microbatches=microbatches)
    return ours, torchs


@pytest.mark.parametrize(
    ("dropout", "settings", "microbatches"),
    [(0.0, {}, 1), (0.1, {}, 1), (0.1, {"static_graph": True}, 2)],
    ids=["plain", "dropout", "dropout, accumulation, static graph"],
)
def test_two_ranks_give_torchs_bits(procs: Pool, dropout: float, settings: dict[str, Any], microbatches: int) -> None:
    results = procs(2).run(both, dropout, settings, microbatches)
    for (ours, our_losses), (torchs, torch_losses) in results:
        assert our_losses == torch_losses
        assert_same_bits(unpacked(ours), unpacked(torchs))
        assert our_losses[-1] < 0.75 * our_losses[0], "and it learns"
    assert_same_bits(unpacked(results[0][0][0]), unpacked(results[1][0][0]))


def both_briefly(rank: int, size: int) -> tuple[Result, Result]:
    # AdamW turns a rounding difference in a tiny gradient into one of a whole step; SGD leaves it what it is.
    def brief(model: Any) -> Result:
        torch.manual_seed(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(tokens(100 * step + rank, 1, 16))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return packed(values(model)), losses

    return brief(DDP(GPT(depth=1), bucket_cap_mb=0.02)), brief(TorchDDP(GPT(depth=1), bucket_cap_mb=0.02))


def test_four_ranks_are_equal_to_each_other_and_close_to_torch(procs: Pool) -> None:
    results = procs(4).run(both_briefly)
    first = results[0][0][0]
    for (ours, our_losses), (torchs, torch_losses) in results:
        assert_same_bits(unpacked(ours), unpacked(first))
        assert_close(unpacked(ours), unpacked(torchs), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(our_losses, torch_losses, rtol=1e-3, atol=1e-3)
