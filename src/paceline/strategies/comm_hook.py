"""torch's communication hooks as reductions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.collectives.protocols import Transport
from paceline.collectives.reduction import Flight, GradBucket
from paceline.collectives.wait import FutureWork

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


def _tensor_of(value: Any) -> torch.Tensor:
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(f"a communication hook's future must hold one tensor, got {type(value).__name__}")
    return value
