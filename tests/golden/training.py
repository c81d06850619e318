"""One case on one rank: a few steps of training, by the public names of the library alone."""

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel.distributed import _MixedPrecision

import paceline
from paceline.strategies.names import by_name
from tests.golden.cases import STEPS, Case
from tests.golden.models import WIDTH, Net, build, loss_of, numbers

MICROS = 3
Losses = list[list[float]]  # by step, in any order
# Powers of two: see tests/golden/models.py. Those of the coefficients of Adam fit into a double, whatever pow() does.
OPTIMIZERS: dict[str, Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.9, foreach=False),
    "adam": lambda params: torch.optim.Adam(params, lr=0.0625, betas=(0.875, 0.984375), foreach=False),
    "bare": lambda params: torch.optim.SGD(params, lr=0.125, foreach=False),  # rows have no momentum
}


@dataclass
class Trainee:
    """A replica, its optimizer, and what has become of them."""

    case: Case
    rank: int
    model: Any
    optimizer: torch.optim.Optimizer
    losses: Losses = field(default_factory=lambda: [[] for _ in range(STEPS)])

    def backward(
        self, step: int, place: int, microbatch: int = 0, share: float = 1.0, spoilt: bool = False
    ) -> torch.Tensor:
        """Forward and backward of one microbatch. `place` is the rank, or in lanes the lane."""
        turn = 1000 * step + 10 * place + microbatch
        dtype = getattr(torch, self.case.dtype)
        x, target = numbers(2 * turn, WIDTH, dtype=dtype), numbers(2 * turn + 1, WIDTH, dtype=dtype)
        if spoilt:
            x[3] = math.inf
        counts = self.model.weight(1 + (3 * place + 5 * microbatch + step) % 7) if self.case.weight else nullcontext()
        with counts:
            loss = loss_of(self.model(x, turn), target) / share
            loss.backward()
        self.losses[step].append(float(loss.detach()))
        return loss.detach()

    def microbatches(self, step: int, place: int) -> None:
        """All microbatches of a step, or of a lane, reduced as the case says."""
        accumulate = self.case.accumulate
        if not accumulate:
            self.backward(step, place)
            return
        share = 1.0 if self.case.weight else float(MICROS)
        for microbatch in range(MICROS):
            last = microbatch == MICROS - 1
            with self._without_sync(accumulate, last=last):
                self.backward(step, place, microbatch, share)
        if accumulate == "by-hand":
            self.model.sync_gradients()

    def _without_sync(self, accumulate: str, *, last: bool) -> AbstractContextManager[None]:
        if accumulate == "switched":
            self.model.enable_grad_sync() if last else self.model.disable_grad_sync()
            return nullcontext()
        found: AbstractContextManager[None] = nullcontext()
        if not last or accumulate == "by-hand":
            found = self.model.no_sync()
        return found

    def zero_grad(self, step: int) -> None:
        """Not after the last step, whose gradients are looked at."""
        self.optimizer.zero_grad(set_to_none=bool(self.case.weight or self.case.lanes or step % 2))


Loop = Callable[[Trainee], None]


def plain(one: Trainee) -> None:
    for step in range(STEPS):
        if step:
            one.zero_grad(step)
        one.microbatches(step, one.rank)
        one.optimizer.step()


def in_lanes(one: Trainee) -> None:
    """A microbatch is known by its lane, whoever runs it."""
    loop = one.case.loop
    for step in range(STEPS):
        if step:
            one.zero_grad(step)
        for lane in one.model.lanes(list(one.model.own_lanes), step):
            if loop == "skip" and lane == step:
                one.model.skip_batch()
            elif loop == "not-finite":
                one.backward(step, lane, spoilt=(step, lane) == (2, 1))
            else:
                one.microbatches(step, lane)
        if loop == "clip":
            clip(one.model)
        one.optimizer.step()


def skip(one: Trainee) -> None:
    """In every step but the first another rank has no batch."""
    for step in range(STEPS):
        if step:
            one.zero_grad(step)
        if step and one.rank == step % one.case.ranks:
            one.model.skip_batch()
        else:
            one.microbatches(step, one.rank)
        one.optimizer.step()


def join(one: Trainee) -> None:
    """Rank 0 runs out of data first."""
    with one.model.join(divide_by_initial_world_size=one.case.loop == "join"):
        for step in range(min(STEPS, 3 + one.rank)):
            if step:
                one.zero_grad(step)
            one.microbatches(step, one.rank)
            one.optimizer.step()


def explicit(one: Trainee) -> None:
    for step in range(STEPS):
        if step:
            one.zero_grad(step)
        one.microbatches(step, one.rank)
        one.model.sync_gradients()
        one.optimizer.step()


def closure(one: Trainee) -> None:
    """A microbatch before the step, and the one that completes it inside."""
    for step in range(STEPS):
        if step:
            one.zero_grad(step)
        with one.model.no_sync():
            one.backward(step, one.rank, 0, 2.0)

        def complete(step: int = step) -> float:
            return float(one.backward(step, one.rank, 1, 2.0))

        one.optimizer.step(complete)


def clipped(one: Trainee) -> None:
    for step in range(STEPS):
        if step:
            one.zero_grad(step)
        one.microbatches(step, one.rank)
        one.model.sync_gradients()
        clip(one.model)
        one.optimizer.step()


def clip(model: torch.nn.Module) -> None:
    """To a norm of a half, with a sum that has one order."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    norm = math.sqrt(math.fsum(value * value for grad in grads for value in grad.flatten().tolist()))
    for grad in grads:
        grad.mul_(min(1.0, 0.5 / norm))


def not_finite(one: Trainee) -> None:
    """Nobody makes the step in which rank 1 has an infinite input."""
    for step in range(STEPS):
        if step:
            one.zero_grad(step)
        one.backward(step, one.rank, spoilt=(step, one.rank) == (2, 1))
        one.optimizer.step()


def heal(one: Trainee) -> None:
    """The last rank's weights change behind everybody's back, and are put right."""
    for step in range(STEPS):
        if step:
            one.zero_grad(step)
        if (step, one.rank) == (2, one.case.ranks - 1):
            with torch.no_grad():
                one.model.module.scale[5] += 1
        one.microbatches(step, one.rank)
        one.optimizer.step()


LOOPS: dict[str, tuple[Loop, Callable[[], dict[str, Any]]]] = {
    "plain": (plain, dict),
    "skip": (skip, dict),
    "join": (join, dict),
    "join-present": (join, dict),
    "explicit": (explicit, lambda: {"overlap": False}),
    "closure": (closure, dict),
    "clip": (clipped, dict),
    "mixed": (plain, lambda: {"mixed_precision": _MixedPrecision(torch.bfloat16, torch.float32, torch.float32)}),
    "hook": (plain, dict),
    "static": (plain, lambda: {"static_graph": True}),
    "not-finite": (not_finite, lambda: {"agreement": paceline.Agreement(not_finite="skip")}),
    "heal": (heal, lambda: {"agreement": paceline.Agreement(state_every=1, drift="heal")}),
}


@contextmanager
def on_two_hosts(rank: int, ranks: int) -> Iterator[None]:
    """The second half of the ranks seem to be in another container: the name of their network is another one."""
    here, asked = os.readlink, "/proc/self/ns/net"

    def readlink(path: Any, *args: Any, **kwargs: Any) -> Any:
        return "net:[0]" if os.fspath(path) == asked and 2 * rank >= ranks + ranks % 2 else here(path, *args, **kwargs)

    with mock.patch("os.readlink", readlink):
        yield


def replica(case: Case, rank: int, transport: Any) -> Any:
    """The model of a case in our class. It begins with other values on every rank but the first, which all get."""
    settings: dict[str, Any] = dict(LOOPS[case.loop][1]()) | case.bucket_settings
    settings |= {"lanes": case.lanes, "seed": 7} if case.lanes else {}
    settings |= {"reduction": by_name(case.reduction)} if case.reduction != "mean" else {}
    net: Net = build(case.model, getattr(torch, case.dtype), seed=rank)
    hosts = on_two_hosts(rank, case.ranks) if case.transport == "two-level" else nullcontext()
    with hosts:
        model = paceline.DistributedDataParallel(net, transport=transport, **settings)
    if case.loop == "hook":
        model.register_comm_hook(None, fp16_compress_hook)
    return model


def train(case: Case, rank: int, transport: Any, wrapped: Callable[[], object] = lambda: None) -> tuple[str, Losses]:
    """The digest of all that was trained, and the losses. `wrapped` is called between the making and the training."""
    model = replica(case, rank, transport)
    optimizer = OPTIMIZERS["bare" if case.model == "sparse" else case.optimizer](model.parameters())
    one = Trainee(case, rank, model, optimizer)
    wrapped()
    (in_lanes if case.lanes else LOOPS[case.loop][0])(one)
    return digest(model.module, optimizer), one.losses


def digest(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """The SHA-256 of parameters, gradients, buffers and optimizer state, with names, types and shapes."""
    found = hashlib.sha256()
    for name, param in module.named_parameters():
        for what, tensor in ((name, param), (f"{name}.grad", param.grad)):
            found.update(what.encode() + bytes_of(tensor))
    for name, buffer in module.named_buffers():
        found.update(name.encode() + bytes_of(buffer))
    for number, moments in sorted(optimizer.state_dict()["state"].items()):
        for name, value in sorted(moments.items()):
            found.update(f"{number}.{name}".encode() + bytes_of(value))
    return found.hexdigest()


def bytes_of(value: Any) -> bytes:
    if not isinstance(value, torch.Tensor):
        return repr(value).encode()
    if value.is_sparse:
        rows = value.detach().coalesce()
        return bytes_of(rows.indices()) + bytes_of(rows.values())
    flat = value.detach().contiguous().reshape(-1)
    return f"{value.dtype}{list(value.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes()


def summed(losses: Sequence[Losses]) -> list[str]:
    """The losses of all ranks, one exact sum per step, so that it does not matter who had which."""
    return [math.fsum(loss for of_rank in losses for loss in of_rank[step]).hex() for step in range(STEPS)]
