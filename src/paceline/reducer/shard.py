"""This rank's part of one parameter under a sharded placement."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from paceline.errors import NotWhole
from paceline.placement import Span
from paceline.reducer.stand_in import GradStandIn, ParamStandIn


class Shard:
    """One rank's block of one parameter: the value that its optimizer updates, with the gradient of that block.

    From a reduction until the next backward the gradient is in `value.grad`, and `param.grad` is a stand-in without
    memory. While a backward runs, `param.grad` is as autograd leaves it, as without shards. What the user does to
    `param.grad` afterwards applies to the gradient of the block: see `follow_user`.
    """

    def __init__(self, name: str, param: nn.Parameter, span: Span) -> None:
        self.name = name
        self.param = param
        self.span = span
        self.form = param.detach().to("meta")  # shape and strides, even while the parameter itself has no memory
        self._home: torch.Tensor | None = None
        if param.numel() and not param.untyped_storage().nbytes():  # it will have memory when it is gathered
            self._home = torch.empty(span[1] - span[0], dtype=param.dtype, device=param.device)
        self.front: ParamStandIn | None = None  # the stand-in that modules hold while the parameter has no memory
        self.value = nn.Parameter(self.block)
        self.stand_in = GradStandIn.of(self)
        self._reduced: torch.Tensor | None = None  # what was put into `value.grad`
        self._guarded: torch.Tensor | None = None  # the same, without its guard during an update
        self._earlier: torch.Tensor | None = None  # of earlier reductions, not dropped yet

    def keep_master(self, dtype: torch.dtype) -> None:
        """Let the optimizer update a copy of the block in a wider type. Gradients keep their type."""
        self.value = nn.Parameter(self.block.to(dtype))
        self.value.grad_dtype = None

    @property
    def has_master(self) -> bool:
        return self.value.dtype is not self.param.dtype

    def leave_parameter(self) -> None:
        """Keep the block in memory of its own, because the parameter's is freed and allocated again."""
        if self._home is None:
            self._home = self.block.clone()
            self.value.data = self._home
        self.front = ParamStandIn.of(self)

    def cut_at(self, span: Span) -> None:
        """Own other elements from now on: `value` stays the object that the optimizer knows, with another length.
        Blocks or masters in memory of their own have no values until these are stored."""
        self.drop()
        self.span = span
        if self._home is not None:
            self._home = torch.empty(span[1] - span[0], dtype=self._home.dtype, device=self._home.device)
        block = self.block
        self.value.data = torch.empty_like(block, dtype=self.value.dtype) if self.has_master else block

    @property
    def block(self) -> torch.Tensor:
        """The block in the parameter's memory, or in its own."""
        return flat_of(self.param)[slice(*self.span)] if self._home is None else self._home

    def begin_backward(self) -> None:
        """Autograd is about to add to `param.grad`, and the bucket to overwrite what was reduced before."""
        if self.param.grad is self.stand_in:
            self.param.grad = None
        elif self.value.grad is self._reduced:  # the user has dropped or replaced it
            self.value.grad = None
        if (reduced := self.value.grad) is not None:
            self._earlier, self.value.grad = reduced.as_subclass(torch.Tensor).clone(), None

    def publish(self, grad: torch.Tensor | None) -> None:
        """The gradient of the block has been reduced. None: no rank used the parameter."""
        earlier, self._earlier = self._earlier, None
        if grad is not None and earlier is not None:
            grad.add_(earlier)
        self._put(earlier if grad is None else grad)
        self.drop_unreduced()

    def _put(self, grad: torch.Tensor | None) -> None:
        self._reduced = self.value.grad = None if grad is None else grad.as_subclass(ShardGrad)

    def lift_guard(self) -> None:
        """Allow plain use of the gradient, which is only this rank's part."""
        if isinstance(grad := self.value.grad, ShardGrad):
            self._guarded, self.value.grad = grad, grad.as_subclass(torch.Tensor)

    def guard(self) -> None:
        """Undo `lift_guard`."""
        guarded, self._guarded = self._guarded, None
        if guarded is not None and (grad := self.value.grad) is not None:
            self.value.grad = guarded if grad.data_ptr() == guarded.data_ptr() else grad.as_subclass(ShardGrad)

    def follow_user(self) -> None:
        """Before the optimizer uses the gradient: apply what the user did to `param.grad` since the reduction.
        None drops it, and a tensor replaces it."""
        shown = self.param.grad
        if shown is self.stand_in:
            return
        if shown is not None:
            self._put(self.cut(shown))
        elif self.value.grad is self._reduced:
            self.value.grad = None

    def set_aside(self) -> Callable[[], None]:
        """Set the gradient aside. Returns a function that restores it."""
        kept = self.param.grad, self.value.grad, self._reduced, self._earlier
        self.drop()

        def put_back() -> None:
            self.param.grad, self.value.grad, self._reduced, self._earlier = kept

        return put_back

    def drop(self) -> None:
        """Drop the gradient, reduced or not."""
        self.value.grad = self._earlier = self._reduced = self.param.grad = None

    def drop_unreduced(self) -> None:
        """Drop what is not in `value.grad`."""
        self._earlier = None
        self.param.grad = None if self.value.grad is None else self.stand_in

    def zero(self) -> None:
        """Make the gradient zeros, if there is one."""
        if self.value.grad is not None:
            self.value.grad.zero_()
        self.drop_unreduced()

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """A copy of the block of a tensor that is shaped like the parameter."""
        return flat_as(self.form, whole)[slice(*self.span)].clone()


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def flat_as(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor` in the order in which `like`, of the same shape, has them in memory."""
    if tensor.stride() != like.stride():
        tensor = torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())
    return flat_of(tensor)


class ShardGrad(torch.Tensor):
    """This rank's part of a gradient, while it waits for the update. It is an ordinary tensor without a norm: clipping
    by the norm of its part alone, each rank would scale its gradients differently. An update gets plain tensors.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "norm" in (name := func.__name__):
            raise NotWhole(
                f"{name}() was called on gradients of an optimizer over shards, of which this rank has only its part, "
                f"so the norm would differ from rank to rank; clip with model.clip_grad_norm_(), whose result is "
                f"the norm over all ranks"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("__deepcopy__", "__reduce_ex__"):
                return func(args[0].as_subclass(torch.Tensor).clone(), *args[1:])
            result = func(*args, **kwargs or {})
            looks_alike = type(result) is torch.Tensor and isinstance(args[0], cls) and result.shape == args[0].shape
            return result.as_subclass(cls) if looks_alike else result
