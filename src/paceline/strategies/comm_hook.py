"""torch's communication hooks as reductions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.collectives.protocols import Transport
from paceline.collectives.reduction import Flight, GradBucket
from paceline.collectives.wait import FutureWork

# The modules of torch whose hooks do more, or less, than combine a bucket.
NOT_IN_SHARDS = {
    "post_localSGD_hook": "averages over some of the ranks and lets replicas differ, which shards of one model cannot",
    "debugging_hooks": "does not reduce gradients, so shards would be updated by the gradients of one rank each",
    "optimizer_overlap_hooks": "updates whole parameters inside backward",
    "ddp_zero_hook": "updates whole parameters inside backward",
    "mixed_precision_hooks": "puts gradients into whole parameters of another type",
}
# The modules whose hooks wait for other ranks inside backward, between two collectives.
WAITING = {"powerSGD_hook"}

Hook = Callable[[Any, Any], "torch.futures.Future[Any]"]


@dataclass(frozen=True, slots=True)
class CommHook:
    """A hook `hook(state, bucket) -> Future[Tensor]` as `register_comm_hook` takes it. The hook divides by itself."""

    state: Any
    hook: Hook

    multi_step = True
    trivial_alone = False

    def divides(self, transport: Transport, device: torch.device) -> bool:
        return True

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        future = self.hook(self.state, bucket)
        if not isinstance(future, torch._C.Future):
            raise RuntimeError(
                f"communication hook {getattr(self.hook, '__qualname__', self.hook)}: callback must return a "
                f"torch.futures.Future object, but got {type(future).__name__}"
            )

        def result() -> torch.Tensor:
            return _tensor_of(future.value())

        return Flight(FutureWork(future), result)


def why_not_in_shards(hook: object) -> str:
    """Why a hook cannot reduce sharded gradients; empty if it can."""
    return NOT_IN_SHARDS.get(_module_of(hook), "")


def waits_in_backward(hook: object) -> bool:
    """Whether it waits for ranks that may wait for this one, if parameters are gathered in backward."""
    return _module_of(hook) in WAITING


def _module_of(hook: object) -> str:
    """The name of the module of torch that a hook is from; empty for a user's own."""
    package, _, module = str(getattr(hook, "__module__", "")).rpartition(".")
    return module if package.endswith("ddp_comm_hooks") else ""


def _tensor_of(value: Any) -> torch.Tensor:
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(f"a communication hook's future must hold one tensor, got {type(value).__name__}")
    return value
