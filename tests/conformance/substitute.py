"""Puts our class in the place of torch's, wherever torch has handed its own out by now.

Every generated test module imports this before anything else, so it happens in the process that starts the tests and in
every rank. What the rewritten sources of GPU tests call at run time stands here too; see tests/conformance/on_cpu.py.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed
import torch.nn.parallel.distributed
import torch.testing._internal.common_distributed as torch_cases

from tests.conformance.suites import CLASS_VARIABLE, OURS

_Target = Callable[..., object]


def class_under_test() -> Any:
    module, name = os.environ.get(CLASS_VARIABLE, OURS).split(":")
    return getattr(importlib.import_module(module), name)


def _put_in_place(original: type, substitute: type) -> None:
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == substitute.__module__.partition(".")[0]:
            continue  # ours has torch's class as its base, and must keep it
        names = getattr(module, "__dict__", {})
        for name in ("DistributedDataParallel", "DDP"):
            if names.get(name) is original:
                names[name] = substitute


def _start_from_server(case: Any) -> None:
    """Start the ranks of a test from a server that has everything imported, instead of from nothing."""
    if int(case.world_size) < 1:
        raise RuntimeError("a world of no ranks would test nothing")
    context = torch.multiprocessing.get_context("forkserver")

    def process(target: _Target, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        return context.Process(target=_run_rank, name=name, args=(dict(os.environ), target, args, kwargs or {}))

    case._start_processes(process)


def _run_rank(environ: Mapping[str, str], target: _Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # The server has the environment of its own start, and tests change theirs.
    os.environ.clear()
    os.environ.update(environ)
    target(*args, **kwargs)


_put_in_place(torch.nn.parallel.distributed.DistributedDataParallel, class_under_test())
_CASES: Any = torch_cases.MultiProcessTestCase
_CASES._spawn_processes = _start_from_server


# ------------------------------------------------------------------------- called by rewritten sources


def on_cpu(device: Any) -> Any:
    """The CPU for a GPU by number, name or device; anything else, such as a dtype, as it is."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return torch.device("cpu")
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


def cpu_device(*_: Any) -> torch.device:
    return torch.device("cpu")


def nothing(*_: Any, **__: Any) -> None:
    return None


def no_context(*_: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def gpus_for_rank(size: int) -> list[list[int]]:
    return [[0, 1, 2, 3] for _ in range(size)]


def devices_by_rank() -> dict[int, list[int]]:
    return {rank: [0] for rank in range(torch.distributed.get_world_size())}


def nccl_version() -> tuple[int, int]:
    return (2, 20)
