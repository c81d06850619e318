"""Results that hold to the last bit, whatever becomes of the code that makes them; and files that still load.

A case that fails here trains to other bits than it did. If that is meant, record it anew: tests/golden/record.py.
"""

import hashlib
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden import stored
from tests.golden.cases import CASES
from tests.golden.files import GOLDEN, HERE, STORED, read
from tests.golden.models import WIDTH, numbers
from tests.golden.running import differences, results, worlds
from tests.pool import Pool

fuses = platform.machine() == "x86_64" and torch.backends.cpu.get_cpu_capability().startswith("AVX")
pytestmark = pytest.mark.skipif(not fuses, reason="recorded with AVX2, which rounds a product and a sum at once")

WORLDS = worlds(CASES)
GOLD = read(GOLDEN)


@pytest.mark.parametrize("world", WORLDS)
def test_every_case_ends_with_the_bits_that_were_recorded(world: str, procs: Pool) -> None:
    wrong = [
        f"{name}: {'; '.join(told)}"
        for name, result in results(world, WORLDS[world], procs)
        if (told := differences(GOLD.get(name), result))
    ]
    assert not wrong, f"{len(wrong)} of {len(WORLDS[world])} cases:\n" + "\n".join(wrong)


# ---- what the recorded results must be like


def test_every_case_is_recorded_and_nothing_else() -> None:
    assert sorted(GOLD) == sorted(CASES)


def alike(key: Any) -> dict[Any, dict[str, str]]:
    """The recorded results of the cases for which `key` gives the same, None: of none."""
    found: dict[Any, dict[str, str]] = {}
    for name, case in CASES.items():
        if (of_case := key(case)) is not None:
            found.setdefault(of_case, {})[name] = repr(GOLD[name])
    return found


def test_lanes_give_one_result_in_every_world() -> None:
    groups = alike(lambda case: case.bits if case.lanes else None)
    assert len(groups) > 10
    for results_of in groups.values():
        assert len(results_of) > 2, results_of
        assert len(set(results_of.values())) == 1, results_of


def test_a_fixed_order_gives_one_result_over_every_transport() -> None:
    groups = alike(lambda case: (case.ranks, case.dtype, case.model) if case.reduction == "fixed-order" else None)
    assert len(groups) > 4
    for results_of in groups.values():
        assert len(set(results_of.values())) == 1, results_of


def test_shared_memory_adds_in_one_order_whatever_the_buckets() -> None:
    assert GOLD["shm-3 tiny"] == GOLD["shm-3"]


def test_only_where_ranks_are_meant_to_differ_do_they() -> None:
    """Outside of lanes buffers are each rank's own until the next forward, and join() leaves optimizers as they are."""
    own = [name for name, result in GOLD.items() if not isinstance(result["digest"], str)]
    assert own
    assert all(CASES[name].model == "buffers" or CASES[name].loop.startswith("join") for name in own), own


def test_the_order_of_additions_shows() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        a, b, c = (numbers(seed, WIDTH, dtype=dtype) for seed in range(3))
        assert int(((a + b) + c != a + (b + c)).count_nonzero()) > 10
    assert len({GOLD[name]["digest"] for name in ("shm-4", "torch-4", "two-level-4")}) == 3


# ---- what was stored


def files_in(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_stored_checkpoint_loads_and_the_run_goes_on(ranks: int, procs: Pool) -> None:
    before = files_in(stored.CHECKPOINT)
    assert stored.loaded_on(ranks, procs) == read(STORED)["checkpoint"]
    assert files_in(stored.CHECKPOINT) == before


@pytest.fixture
def own_kernels() -> Iterator[None]:
    """A replay takes up the settings that the capsule was made with, for the life of its process."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


@pytest.mark.usefixtures("own_kernels")
def test_what_goes_wrong_in_a_stored_capsule_goes_wrong_again(capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    for kind in stored.CAPSULES:
        assert stored.replay(kind) == 0
        said[kind] = stored.told(capsys.readouterr().out)
    assert said == {
        "not-finite": [
            "0 0 8.1629 yes 2.34286 –",
            "0 1 8.94954 yes 2.3483 –",
            "1 2 9.91395 yes 2.57951 –",
            "1 3 nan NO nan input: 1 × NaN",
            "reproduced: rank 1, lane 3: not finite, first in input: 1 × NaN",
        ],
        "crash": [
            "0 – – – 0 ArithmeticError: turn 2 is not for this model",
            "reproduced: rank 0 raises ArithmeticError: turn 2 is not for this model",
        ],
    }


def test_stored_files_are_small_and_name_no_place() -> None:
    files = [*stored.CAPSULES.values(), *(path for path in stored.CHECKPOINT.rglob("*") if path.is_file())]
    assert 0 < sum(path.stat().st_size for path in files) < 100_000
    for path in files:
        content = path.read_bytes()
        assert not any(place in content for place in (b"/tmp", b"/home", str(HERE.parents[1]).encode())), path
