"""What a contender makes of the model: a trainee that the timed loop drives."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.bench.gpt import Batch
from paceline.bench.spec import StepSpec


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What a contender is built for: the step that is measured, and the rank and device that it runs on."""

    spec: StepSpec
    name: str  # of the contender
    arguments: dict[str, Any]
    rank: int
    size: int
    device: torch.device
    this_checkout: bool = True  # False: paceline comes from another checkout, of which only public names may be used
    counts_as_several: bool = False  # the one rank takes the path of several


@dataclass
class Trainee:
    """A model wrapped in one kind of data parallelism."""

    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    update: Callable[[], None]  # optimizer step and zero_grad
    params: Callable[[], list[torch.Tensor]]  # the replicated parameters; empty where they are sharded
    sent_bytes: int  # that a rank sends in one step, by the algorithm
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext  # around every microbatch but the last
    microbatches: Callable[[list[Batch], int], Iterable[Batch]] = lambda batches, _: batches  # iterates over a step
    divides_loss: bool = False  # the contender itself divides the loss by the number of microbatches
    communicate: Callable[[], None] | None = None  # all communication of a step, alone
    observe: Callable[[], dict[str, Any]] = dict  # what the contender knows about its last step
    close: Callable[[], None] = lambda: None
    notes: list[str] = field(default_factory=list)


def update_with(spec: StepSpec, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    to_none = spec.zero_grad == "none"

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)

    return update


def gradient_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def all_reduce_bytes(model: nn.Module, size: int) -> int:
    """What each rank sends in an all-reduce that sends as little as possible: a ring, or shards."""
    return 2 * (size - 1) * gradient_bytes(model) // size


def fully_sharded_bytes(model: nn.Module, context: BuildContext) -> int:
    """The same where parameters are in shards: gathered in every forward and again in every backward, while gradients
    are reduced and scattered once."""
    gathers = 2 * context.spec.accumulate
    return (gathers + 1) * (context.size - 1) * gradient_bytes(model) // context.size


def all_reduce_alone(numels: Sequence[int], context: BuildContext) -> Callable[[], None]:
    """All-reduces of these sizes through torch.distributed, in flight together, with nothing to hide under."""
    dtype: torch.dtype = getattr(torch, context.spec.shape.dtype)

    def communicate() -> None:
        buffers = [torch.zeros(numel, dtype=dtype, device=context.device) for numel in numels]
        for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
            assert work is not None, "this rank is in the group"
            work.wait()

    return communicate


def detached(params: Callable[[], Any]) -> Callable[[], list[torch.Tensor]]:
    return lambda: [param.detach() for param in params()]
