"""Loading: verified in parts by the ranks, and then read into the tensors that are there, in bounded memory."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.checkpoint import Checkpointer, NoCheckpoint, digest
from paceline.stored.directory import CHUNK
from tests.models import DDP
from tests.pool import Pool

MIB = 1 << 20


def run(seed: int, width: int = 1024) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer with state, of 12 bytes per parameter."""
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(16)])
    optimizer = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save(rank: int, size: int, directory: str, width: int) -> str:
    model, optimizer = run(0, width)
    with Checkpointer(directory, asynchronous=False) as checkpointer:
        assert checkpointer.save(1, model=model, optimizer=optimizer).problem is None
    return digest(model, optimizer, 1)


def own_memory() -> int:
    """Bytes of this process that are in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def run_in_shards(seed: int) -> tuple[Any, Any]:
    """The same with parameters, gradients and states in shards."""
    torch.manual_seed(seed)
    net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)])
    model = DDP(net, placement="zero3", units=[nn.Linear], timeout=20)
    optimizer = model.optimizer(torch.optim.Adam)
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def load_and_watch(rank: int, size: int, directory: str, placement: str) -> tuple[str, int, bool]:
    made: tuple[Any, Any] = run(1) if placement == "ddp" else run_in_shards(1)
    model, optimizer = made

    def held() -> list[int]:
        """Where in memory the parameters and states of this rank are."""
        found = [*(model.parameters() if placement == "ddp" else [shard.block for shard in model._owned.shards])]
        found += [value for state in optimizer.state.values() for value in state.values()]
        return [tensor.data_ptr() for tensor in found]

    places = held()
    checkpointer = Checkpointer(directory)
    before = own_memory()
    peak, done = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    checkpointer.load(model=model, optimizer=optimizer)
    done.set()
    watcher.join()
    in_place = held() == places
    return digest(model, optimizer, 1), peak - before, in_place


def test_a_load_fills_the_tensors_that_are_there_and_needs_little_memory(procs: Pool, tmp_path: Path) -> None:
    expected = procs(2).run(save, str(tmp_path), 1024)[0]
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "step-00000001").iterdir()}
    assert abs(sizes["state-00001.safetensors"] / sum(sizes.values()) - 0.5) < 0.01, "each has written its share"
    assert sum(sizes.values()) > 192 * MIB
    for placement in ("ddp", "zero3"):
        for told, above, in_place in procs(2).run(load_and_watch, str(tmp_path), placement):
            assert told == expected and in_place, placement
            assert above < 64 * MIB, f"{placement}: {above / MIB:.0f} MiB"


def load_damaged(rank: int, size: int, directories: list[str]) -> tuple[str, bool]:
    model, optimizer = run(1, 512)
    before = digest(model, optimizer, 0)
    with pytest.raises(NoCheckpoint) as refused:
        Checkpointer(directories[rank]).load(model=model, optimizer=optimizer)
    return str(refused.value), digest(model, optimizer, 0) == before


@pytest.mark.parametrize(("name", "at"), [("model.safetensors", 100), ("state.safetensors", -100)])
@pytest.mark.parametrize("shared", [True, False])
def test_damage_that_one_rank_finds_keeps_all_from_loading(
    procs: Pool, tmp_path: Path, name: str, at: int, shared: bool
) -> None:
    """The one is in what rank 0 verifies where both share the work, the other in rank 1's part."""
    procs(2).run(save, str(tmp_path / "a"), 512)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    file = tmp_path / "a" / "step-00000001" / name
    raw = bytearray(file.read_bytes())
    assert len(raw) > CHUNK
    raw[at] ^= 1
    file.write_bytes(raw)
    results = procs(2).run(load_damaged, [str(tmp_path / name) for name in ("aa" if shared else "ab")])
    for text, untouched in results:
        assert untouched
        assert "(rank 0): bytes " in text and f"of {name} have changed: the SHA-256 is" in text
        assert "(rank 1): bytes " in text if shared else "(rank 1): rank 0 has no intact copy of it" in text


def load_weights(rank: int, size: int, directory: str) -> tuple[str, str]:
    """The weights alone, and then the optimizer too."""
    model, optimizer = run(1, 512)
    checkpointer = Checkpointer(directory)
    checkpointer.load(model=model)
    loaded = digest(model, None, 1)
    with pytest.raises(NoCheckpoint) as refused:
        checkpointer.load(model=model, optimizer=optimizer)
    return loaded, str(refused.value)


def test_ranks_verify_what_they_will_read_and_no_more(procs: Pool, tmp_path: Path) -> None:
    procs(2).run(save, str(tmp_path), 512)
    file = tmp_path / "step-00000001" / "state-00001.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    expected = digest(run(0, 512)[0], None, 1)
    for loaded, text in procs(2).run(load_weights, str(tmp_path)):
        assert loaded == expected
        assert "of state-00001.safetensors have changed" in text
