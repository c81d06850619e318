"""How tests share the cores: how many run at once, which files come first, and which tests run alone."""

import fcntl
import os
from collections.abc import Generator
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# What takes longest begins first, so that the workers end together.
LONGEST = (
    "procs/test_examples.py",
    "conformance/test_torch_ddp.py",
    "procs/test_train.py",
    "procs/test_hang.py",
    "procs/test_train_lanes.py",
    "notebook/test_tutorials.py",
    "notebook/test_magics.py",
    "notebook/test_rank_kernels.py",
    "procs/test_launch_torch.py",
    "procs/test_bench.py",
    "procs/test_shm.py",
    "procs/test_launch.py",
    "procs/test_ray.py",
    "procs/test_graceful_ends.py",
    "procs/test_chaos.py",
    "procs/test_rehearsals.py",
    "notebook/test_browser.py",
    "procs/test_listeners.py",
    "procs/test_strangers.py",
    "procs/test_secrets.py",
    "procs/test_elastic_launch.py",
    "procs/test_elastic_shards.py",
    "procs/test_two_level.py",
    "procs/test_hosts.py",
    "procs/test_shm_crowd.py",
    "procs/test_doctor.py",
    "procs/test_plan_measured.py",
    "procs/test_shard_groups.py",
    "procs/test_from_meta.py",
    "procs/test_reduce_dtype.py",
    "procs/test_waits.py",
    "golden/test_golden.py",
    "procs/test_corners.py",
    "procs/test_checkpoint_kills.py",
    "procs/test_checkpoint_shares.py",
    "procs/test_checkpoint_loading.py",
    "procs/test_checkpoint_dcp.py",
    "procs/test_update_gathers.py",
    "procs/test_placement_hooks.py",
    "procs/test_compile_units.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n auto`, which ./scripts/test asks for: a worker per core, and none for a single file."""
    named = {Path(argument.partition("::")[0]) for argument in config.args}
    single = len(named) == 1 and named.pop().is_file()
    return 0 if single else len(os.sched_getaffinity(0))


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Floor())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {HERE / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


class Floor:
    """Where the workers run their tests. A test that is marked `alone` has it to itself.

    Its locks are files that exist anyway, so nothing has to be made or removed. Every test passes the gate before it
    enters the floor: one that waits for the floor to empty keeps those that come later outside.
    """

    def __init__(self) -> None:
        self._gate = os.open(__file__, os.O_RDONLY)
        self._floor = os.open(HERE, os.O_RDONLY)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # before the plugin that counts a test's seconds
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        alone = item.get_closest_marker("alone") is not None
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._floor, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            # Said, not left to closing: a process that a test forked has the same open file.
            fcntl.flock(self._floor, fcntl.LOCK_UN)
