"""paceline: data-parallel training for PyTorch."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.checkpoint import Checkpointer, NoCheckpoint, Preemption, digest, export_weights
    from paceline.collectives.checked import all_gather, all_reduce, barrier, broadcast
    from paceline.data import DistributedSampler, Loader, SampleLog
    from paceline.elastic.elastic import Elastic
    from paceline.memory_plan.of_model import plan
    from paceline.replica.agreement import Agreement
    from paceline.replica.ddp import DistributedDataParallel
    from paceline.start import get, init, shutdown
    from paceline.world import World

__all__ = [
    "Agreement",
    "Checkpointer",
    "DistributedDataParallel",
    "DistributedSampler",
    "Elastic",
    "Loader",
    "NoCheckpoint",
    "Preemption",
    "SampleLog",
    "World",
    "all_gather",
    "all_reduce",
    "barrier",
    "broadcast",
    "digest",
    "export_weights",
    "get",
    "init",
    "plan",
    "shutdown",
]

_HOMES = {
    "Agreement": "replica.agreement",
    "Checkpointer": "checkpoint",
    "DistributedDataParallel": "replica.ddp",
    "DistributedSampler": "data.sampler",
    "Elastic": "elastic.elastic",
    "Loader": "data",
    "NoCheckpoint": "checkpoint",
    "Preemption": "checkpoint",
    "SampleLog": "data",
    "World": "world",
    "all_gather": "collectives.checked",
    "all_reduce": "collectives.checked",
    "barrier": "collectives.checked",
    "broadcast": "collectives.checked",
    "digest": "checkpoint",
    "export_weights": "checkpoint",
    "get": "start",
    "init": "start",
    "plan": "memory_plan.of_model",
    "shutdown": "start",
}
_FOLDERS = (
    *("agree", "bucket_plan", "checkpoint", "collectives", "data", "elastic", "errors", "faults", "kernels", "launch"),
    *("layout", "memory_plan", "observe", "placement", "progress", "randomness", "reducer", "replica", "start"),
    *("strategies", "trace", "world"),
)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext paceline`: run the cells of a notebook on N ranks."""
    import_module("paceline.notebook.extension").load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext paceline`: end the ranks and remove the magics."""
    import_module("paceline.notebook.extension").unload(shell)


def __getattr__(name: str) -> Any:
    """Load names when they are first used, so that the command line answers `--help` without loading torch."""
    if name in _HOMES:
        # Stored in the module, so that this function is called once per name.
        value = globals()[name] = getattr(import_module(f"paceline.{_HOMES[name]}"), name)
        return value
    if name == "__version__":
        try:
            return version("paceline")
        except PackageNotFoundError:  # run from the sources, where nothing could be installed
            return "0+sources"
    if name in _FOLDERS:
        return import_module(f"paceline.{name}")
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_FOLDERS})
