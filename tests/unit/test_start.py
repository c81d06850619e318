"""init, get and shutdown in one process."""

import os

import pytest
import torch.distributed as dist

from paceline.errors import IllegalMove, UsageError, WorldError
from paceline.start import get, init, shutdown


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_a_world_of_one_needs_no_launcher() -> None:
    environ = dict(os.environ)
    world = init(device="cpu")
    try:
        assert (world.rank, world.size, world.local_rank) == (0, 1, 0)
        assert world.device.type == "cpu"
        assert "single process" in world.source
        assert (get("ws"), get("rank"), get("grank"), get("lrank")) == (1, 0, 0, 0)
        assert get("pg") is dist.group.WORLD
        assert dict(os.environ) == environ
    finally:
        shutdown()
    assert not dist.is_initialized()
    shutdown()


def test_init_again_returns_the_same_world_or_says_what_contradicts() -> None:
    world = init(device="cpu", backend="gloo")
    try:
        assert init(device="cpu") == world
        assert init(device="cpu", backend="gloo", rank=0, world_size=1).size == 1
        with pytest.raises(UsageError, match="already formed with world_size=1, got world_size=2"):
            init(world_size=2)
        with pytest.raises(UsageError, match="already formed with backend=.*gloo.*, got backend="):
            init(backend="cpu:gloo,cuda:nccl")
    finally:
        shutdown()


def test_a_group_that_someone_else_formed_is_taken_as_it_is() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert init(device="cpu").size == 1
        assert get("lrank") == 0
    finally:
        shutdown()


def test_before_init_the_environment_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (get("ws"), get("rank")) == (1, 0)
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert (get("ws"), get("rank"), get("grank"), get("lrank")) == (4, 3, 3, 1)
    with pytest.raises(IllegalMove, match=r"get\('pg'\) needs a process group .* call paceline.init\(\) first"):
        get("pg")


def test_an_unknown_question_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="get\\('world'\\) .* 'ws', 'rank', 'grank', 'lrank', 'pg'"):
        get("world")


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf"), "30", None, True])
def test_a_bad_timeout_is_refused(timeout: float) -> None:
    with pytest.raises(UsageError, match="timeout must be a number of seconds above 0, got"):
        init(timeout=timeout)


def test_bad_names_are_refused() -> None:
    with pytest.raises(UsageError, match="backend='glue' is not known: expected one of .*gloo"):
        init(backend="glue")
    with pytest.raises(UsageError, match="device='gpu' is not a device"):
        init(device="gpu")
    with pytest.raises(UsageError, match="rank and world_size belong together"):
        init(rank=0)
    assert not dist.is_initialized()


def test_ranks_that_were_not_told_where_to_meet_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorldError, match="rank 0 of 2 does not know where to find rank 0: expected MASTER_ADDR"):
        init(rank=0, world_size=2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(WorldError, match="expected MASTER_PORT, got none"):
        init(rank=0, world_size=2)
