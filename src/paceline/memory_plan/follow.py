"""One forward and backward with tensors that have sizes but no memory, and what was born and freed on the way."""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from paceline.memory_plan.numbers import PlanError
from paceline.memory_plan.storages import ACTIVATIONS, CASTS, GRADIENTS, LOGITS, TEMPORARIES, StorageEvent, Timeline

Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class FollowedStep:
    """What is followed: a model, a batch, how the loss comes about, and where and in which dtypes it runs."""

    model: nn.Module
    batch: Any
    loss: Loss | None
    device: torch.device
    weights_dtype: torch.dtype | None  # None: as they are
    autocast: bool


def follow(step: FollowedStep, batch_size: int | None = None) -> Timeline:
    """The timeline of one microbatch, with the batch's own number of samples or another one."""
    # Checkpointing sets the random state again while it recomputes; a plan must not move it.
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(gpus), FakeTensorMode(allow_non_fake_inputs=True):
        model = _without_memory(step)
        batch = tree_map(lambda item: _fake_input(item, step.device, step.batch, batch_size), step.batch)
        record = Recorder(model)
        try:
            with record:
                with torch.autocast(step.device.type, torch.bfloat16, enabled=step.autocast):
                    loss = call(model, batch, step.loss)
                record.enter_backward()
                loss.backward()
                del loss
        except PlanError:
            raise
        except Exception as error:
            raise PlanError(
                f"the model could not be followed without memory: {type(error).__name__}: {_first_line(error)}. "
                "plan() needs a model whose forward does not look at the values of tensors; without a batch it plans "
                "the states alone, and `paceline plan` plans a transformer from its numbers"
            ) from error
        return record.timeline()


def call(model: nn.Module, batch: Any, loss: Loss | None) -> torch.Tensor:
    """The loss of one batch.

    Without `loss` the model returns it: model(*batch), model(**batch) or model(batch). With `loss` the last part of
    the batch is the target: loss(model(*batch[:-1]), batch[-1]); a batch of one part has none.
    """
    target: tuple[Any, ...] = ()
    if isinstance(batch, Mapping):
        result = model(**batch)
    elif isinstance(batch, (tuple, list)):
        inputs = batch
        if loss is not None and len(batch) > 1:
            inputs, target = batch[:-1], (batch[-1],)
        result = model(*inputs)
    else:
        result = model(batch)
    found = result if loss is None else loss(result, *target)
    if isinstance(found, Mapping):
        found = found.get("loss", found)
    if not (isinstance(found, torch.Tensor) and found.numel() == 1):
        shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise PlanError(
            f"expected the model to return its loss, one number, got {shape}: pass loss=, a function of the model's "
            "result and the last part of the batch"
        )
    return found


class Recorder(TorchDispatchMode):
    """Notes every storage that is born or freed while it is active."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: list[int] = []
        self._births: list[tuple[int, bool, bool]] = []  # number of the operation, in backward, copy of a weight
        self._events: list[tuple[StorageEvent, int]] = []
        self._numbers: dict[int, int] = {}  # id of a living storage → its number
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._taken: set[int] = set()
        self._operation = 0
        self._backward_from: int | None = None
        self._last_use = self._first_use_in_backward = -1
        params = list(model.parameters())
        # Held, so that no other storage gets their ids.
        self._given = [tensor.untyped_storage() for tensor in (*params, *model.buffers())]
        self._weights = {id(param.untyped_storage()) for param in params}
        self._known = {id(storage) for storage in self._given}
        self._hooks = [p.register_post_accumulate_grad_hook(self._take) for p in params if p.requires_grad]

    def enter_backward(self) -> None:
        self._backward_from = len(self._events)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._operation += 1
        reads_weights = any(id(storage) in self._weights for storage in _storages((args, kwargs)))
        is_copy = reads_weights and func is torch.ops.aten._to_copy.default
        if reads_weights and not is_copy:
            if self._backward_from is None:
                self._last_use = self._operation
            elif self._first_use_in_backward < 0:
                self._first_use_in_backward = self._operation
        for storage in _storages(result):
            self._note(storage, is_copy)
        return result

    def _note(self, storage: torch.UntypedStorage, is_copy: bool) -> None:
        key = id(storage)
        if key in self._known or key in self._numbers:
            return
        number = len(self._sizes)
        self._sizes.append(storage.nbytes())
        self._births.append((self._operation, self._backward_from is not None, is_copy))
        self._events.append((StorageEvent.BORN, number))
        self._numbers[key] = number
        if is_copy:
            self._weights.add(key)

        def gone(_: Any) -> None:
            self._events.append((StorageEvent.FREED, number))
            self._weights.discard(key)
            del self._numbers[key], self._watches[key]

        self._watches[key] = weakref.ref(storage, gone)

    def _take(self, param: torch.Tensor) -> None:
        assert param.grad is not None
        for storage in _storages(param.grad):
            number = self._numbers.get(id(storage))
            if number is not None and number not in self._taken:
                self._taken.add(number)
                self._events.append((StorageEvent.TAKEN, number))

    def timeline(self) -> Timeline:
        for hook in self._hooks:
            hook.remove()
        kinds = tuple(self._kind(number) for number in range(len(self._sizes)))
        begin = len(self._events) if self._backward_from is None else self._backward_from
        return Timeline(tuple(self._sizes), kinds, tuple(self._events), begin)

    def _kind(self, number: int) -> str:
        operation, in_backward, is_copy = self._births[number]
        if number in self._taken:
            return GRADIENTS
        if is_copy:
            return CASTS
        if in_backward:
            # Before backward meets the first weight it is still busy with the loss.
            return LOGITS if operation < self._first_use_in_backward else TEMPORARIES
        return LOGITS if operation >= self._last_use else ACTIVATIONS


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for item in tree_leaves(tree):
        if isinstance(item, torch.Tensor):
            if item.layout is torch.sparse_coo:
                yield item._indices().untyped_storage()
                yield item._values().untyped_storage()
            else:
                yield item.untyped_storage()


def _without_memory(step: FollowedStep) -> nn.Module:
    """A copy of the model whose parameters and buffers have sizes only. The model itself is not touched."""
    stand_ins: dict[int, Any] = {}
    for param in step.model.parameters():
        empty = _empty_like(param, step.device, step.weights_dtype)
        stand_ins[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
    for buffer in step.model.buffers():
        stand_ins[id(buffer)] = _empty_like(buffer, step.device, step.weights_dtype)
    try:
        return copy.deepcopy(step.model, stand_ins)
    except Exception as error:
        raise PlanError(
            f"the model cannot be copied: {type(error).__name__}: {_first_line(error)}. Plan it before it is wrapped, "
            "or without a batch: then the states alone are planned"
        ) from error


def _empty_like(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    chosen = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=chosen, device=device)


def _fake_input(item: Any, device: torch.device, batch: Any, batch_size: int | None) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    shape = list(item.shape)
    if batch_size is not None and shape and shape[0] == samples_of(batch):
        shape[0] = batch_size
    return torch.empty(shape, dtype=item.dtype, device=device, requires_grad=item.requires_grad)


def samples_of(batch: Any) -> int:
    """The first dimension of the batch's first tensor."""
    for item in tree_leaves(batch):
        if isinstance(item, torch.Tensor) and item.dim() > 0:
            return int(item.shape[0])
    raise PlanError("batch: expected a tensor, a tuple of tensors or a mapping of tensors, with samples in dimension 0")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]
