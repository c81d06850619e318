"""Placeholders for gradients and parameters that exist only in shards."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import torch
from torch import nn

from paceline.errors import NotWhole

if TYPE_CHECKING:
    from paceline.reducer.shard import Shard


class StandIn(torch.Tensor):
    """A placeholder for a tensor that the ranks hold in shards: it has a shape and no values."""

    _what: str
    _way_out: ClassVar[str]

    @classmethod
    def _like(cls, param: torch.Tensor, what: str) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            param.shape,
            strides=param.stride(),
            dtype=param.dtype,
            device=param.device,
            requires_grad=False,  # not part of any graph, so autograd refuses it as an input
        )
        made._what = what
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self._what}, kept in shards"

    @property
    def requires_grad(self) -> bool:
        return False

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        return self

    def __deepcopy__(self, _: Any) -> NoReturn:
        self._not_whole("a copy")

    def __reduce_ex__(self, _: Any) -> NoReturn:
        self._not_whole("a copy or a pickle")

    def _not_whole(self, what: object) -> NoReturn:
        raise NotWhole(
            f"{what} needs {self._what} in full, but under this placement each rank holds only a shard of it. "
            f"{self._way_out}"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        found = next(arg for arg in _flatten([*args, *(kwargs or {}).values()]) if isinstance(arg, StandIn))
        return found._not_whole(func)


class GradStandIn(StandIn):
    """In `param.grad`.

    Without it `param.grad` would be None, and code that reads gradients through `model.parameters()`, such as torch's
    own clip_grad_norm_, would treat them as missing and be silently wrong.
    """

    _way_out = (
        "Clip with model.clip_grad_norm_(), make the optimizer with model.optimizer(), and read this rank's part from "
        "the gradients of optimizer.param_groups"
    )
    _shard: "Callable[[], Shard | None]"

    @classmethod
    def of(cls, shard: "Shard") -> Self:
        made = cls._like(shard.param, f"the gradient of {shard.name}")
        made._shard = weakref.ref(shard)
        return made

    def register_hook(self, hook: Any) -> NoReturn:
        self._not_whole("register_hook()")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.zero_.default and (shard := args[0]._shard()) is not None:
            shard.zero()
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


class ParamStandIn(StandIn):
    """A placeholder for a parameter without memory: it forwards everything that users do with a parameter, except
    reading values."""

    _way_out = "It is available while the unit that holds it runs its forward, and inside `with model.whole():`"
    _is_param = True  # what torch asks for to know an nn.Parameter
    _param: nn.Parameter

    @classmethod
    def of(cls, shard: "Shard") -> Self:
        made = cls._like(shard.param, f"the parameter {shard.name}")
        made._param = shard.param
        return made

    @property
    def grad(self) -> torch.Tensor | None:
        return self._param.grad

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        self._param.grad = grad

    @property
    def requires_grad(self) -> bool:
        return self._param.requires_grad

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        self.requires_grad_(requires_grad)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self._param.requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: Any) -> Any:
        return self._param.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        return self._param.register_post_accumulate_grad_hook(hook)


def _flatten(args: Sequence[Any]) -> list[Any]:
    return [one for arg in args for one in (_flatten(arg) if isinstance(arg, list | tuple) else [arg])]
