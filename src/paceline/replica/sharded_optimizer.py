"""`model.optimizer()`: an ordinary torch optimizer over the blocks that this rank owns."""

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim.optimizer import Optimizer

from paceline.collectives.gather import gather_ints, gather_unless_equal
from paceline.collectives.group import Group
from paceline.collectives.protocols import Op
from paceline.errors import CollectiveMismatch, ModelMismatch, UsageError
from paceline.reducer.shard import Shard, flat_as
from paceline.replica import master_weights
from paceline.replica.assembly import metas_of
from paceline.replica.closures import with_closure
from paceline.replica.owned import OwnedBlocks
from paceline.stored.tensor_part import TensorPart

MASTER = "master"  # the key of the wide copy in the state of a parameter


def make_optimizer(
    replica: Any, made: Any, params: Any, options: Mapping[str, Any], master: torch.dtype | None
) -> Optimizer:
    """An optimizer of class `made`, or the existing one `made`, over this rank's blocks of a replica."""
    group, owned = replica._group, replica._owned
    if owned is None and master is None:
        if isinstance(made, Optimizer):
            return made
        return cast(Optimizer, made(replica._managed.params if params is None else params, **options))
    if owned is None:
        owned = replica._owned = OwnedBlocks(replica._managed.params, metas_of(replica), group, cut=False)
    if isinstance(made, Optimizer):
        if params is not None or options:
            raise UsageError("model.optimizer(existing) takes over its parameters and options; pass it alone")
        if isinstance(made, ShardedOptimizer) and made._owned is owned:
            return made
        if made.state or isinstance(made, ShardedOptimizer):
            raise UsageError(
                f"this {type(made).__name__} has state already, over whole parameters or those of another replica; "
                f"convert it before its first step, then load that state with optimizer.load_state_dict()"
            )
        optimizer = made
        accepted = inspect.signature(type(made)).parameters
        options = {key: value for key, value in made.defaults.items() if key in accepted}
    else:
        optimizer = made(params if params is not None else [shard.param for shard in owned.shards], **options)
    if owned.cut:
        _check_same_optimizer(optimizer, owned, group, master)
    per_element = _check_elementwise(type(optimizer), options, owned) if owned.cut else frozenset[str]()
    update = _Update(owned, master)
    update.add(_params_of(optimizer))
    for options_of_group in optimizer.param_groups:
        options_of_group["params"] = [_updated(param, owned) for param in options_of_group["params"]]
    optimizer.__class__ = _sharded(cast(Any, type(optimizer)))
    sharded = cast(ShardedOptimizer, optimizer)
    sharded._owned, sharded._group, sharded._per_element, sharded._update = owned, group, per_element, update
    owned.optimizers.add(sharded)
    optimizer.register_step_pre_hook(update.before)
    optimizer.register_step_post_hook(update.after)
    return optimizer


def _params_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _shard(param: torch.Tensor, owned: OwnedBlocks) -> Shard | None:
    """This rank's shard of a parameter. None: it is frozen, so optimizers ignore it."""
    found = owned.find(param)
    if found is None and param.requires_grad:
        raise UsageError(
            f"model.optimizer() was given a parameter of shape {list(param.shape)} that this replica does not train: "
            f"it was frozen, ignored or missing when the module was wrapped; pass parameters of the model, or create "
            f"a separate optimizer for it"
        )
    return found


def _updated(param: torch.Tensor, owned: OwnedBlocks) -> torch.Tensor:
    """The tensor that an optimizer updates instead of a parameter."""
    shard = _shard(param, owned)
    return param if shard is None or not (owned.cut or shard.has_master) else shard.value


def _check_same_optimizer(optimizer: Optimizer, owned: OwnedBlocks, group: Group, master: object) -> None:
    """Raise on every rank if ranks have created different optimizers for parts of one model."""
    at = {id(shard): index for index, shard in enumerate(owned.shards)}
    mine = {
        "class": type(optimizer).__name__,
        "master": str(master),
        "groups": [
            {
                **{key: repr(value) for key, value in options.items() if key != "params"},
                "params": [at.get(id(owned.find(param)), -1) for param in options["params"]],
            }
            for options in optimizer.param_groups
        ],
    }
    if (told := gather_unless_equal(group, mine, "the comparison of optimizers")) is None:
        return
    rank = next(rank for rank, other in enumerate(told) if other != told[0])
    here, there = _flat(told[0]), _flat(told[rank])
    key = next(key for key in {**here, **there} if here.get(key) != there.get(key))
    raise ModelMismatch(
        f"ranks created different optimizers: {key} is {here.get(key)} on rank 0 and {there.get(key)} on rank {rank}; "
        f"call model.optimizer() with the same arguments on every rank"
    )


def _flat(described: Mapping[str, Any]) -> dict[str, str]:
    """The arguments of an optimizer, with a name for every detail."""
    found = {key: str(value) for key, value in described.items() if key != "groups"}
    for number, options in enumerate(described["groups"]):
        found.update((f"{key} of group {number}", str(value)) for key, value in options.items())
    return found


class _Update:
    """The work before and after an update of one optimizer."""

    def __init__(self, owned: OwnedBlocks, master: torch.dtype | None) -> None:
        self.master = master
        self._owned = owned
        self._shards: list[Shard] = []
        self._masters: list[Shard] = []
        self._narrow: list[torch.Tensor | None] = []

    def add(self, params: Iterable[torch.Tensor]) -> None:
        """Also update this rank's blocks of these parameters."""
        found = [_shard(param, self._owned) for param in params]
        shards = [shard for shard in found if shard is not None and shard not in self._shards]
        if self.master is not None:
            self._owned.keep_masters(self.master, shards)
        self._shards += shards
        self._masters += [shard for shard in shards if shard.has_master]

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._owned.follow_parameters()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._take_gradients()
            return None
        return with_closure(args, kwargs, self._take_gradients, first=self._give_back_gradients)

    def _take_gradients(self) -> None:
        if self._owned.cut:
            for shard in self._shards:
                shard.follow_user()
                shard.lift_guard()
        with torch.no_grad():
            self._narrow = [shard.value.grad for shard in self._masters]
            master_weights.take_changes(self._masters)
            grads = self._narrow if self._owned.cut else [_whole_gradient(shard) for shard in self._masters]
            for shard, wide in zip(self._masters, master_weights.widened(grads, self._masters), strict=True):
                shard.value.grad = wide

    def _give_back_gradients(self) -> None:
        for shard, grad in zip(self._masters, self._narrow, strict=False):  # empty if they were not taken
            shard.value.grad = grad
        self._narrow = []
        for shard in self._shards:
            shard.guard()

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._give_back_gradients()
        with torch.no_grad():
            master_weights.store_values(self._shards)
            self._owned.follow_update()


def _whole_gradient(shard: Shard) -> torch.Tensor | None:
    """The gradient of a parameter that this rank holds in full, flat like its master."""
    grad = shard.param.grad
    return shard.value.grad if grad is None else flat_as(shard.param, grad)


class ShardedOptimizer(Optimizer):
    """The differences of a sharded optimizer from its class: its gradients and its state belong to whole
    parameters, of which `param_groups` holds this rank's blocks."""

    _owned: OwnedBlocks
    _group: Group
    _per_element: frozenset[str]  # the states with one value per element of a parameter
    _update: _Update

    def _shards(self) -> list[tuple[nn.Parameter, Shard | None]]:
        """The updated tensors, each with its shard. None: a whole parameter."""
        found = [(param, self._owned.find(param)) for param in _params_of(self)]
        return [(param, shard if shard is not None and shard.value is param else None) for param, shard in found]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler.step() reads this before it decides whether to step, from the non-finite values in the shards of
        this rank: so the findings of all ranks are combined here."""
        caller = sys._getframe(1)
        if caller.f_code is GradScaler.step.__code__ and self._owned.cut:
            self._agree_on_infinities(caller.f_locals["self"])
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))  # set by fused ones

    def _agree_on_infinities(self, scaler: GradScaler) -> None:
        state = scaler._per_optimizer_states[id(self)]
        if state["stage"] is OptState.READY:
            scaler.unscale_(self)
        found = state["found_inf_per_device"]
        device = self._owned.shards[0].param.device
        flag = found.setdefault(device, torch.zeros((), device=device))  # the rank may own nothing with a gradient
        work = self._group.transport.all_reduce(flag.view(1), Op.MAX)
        self._group.wait(work, "whether all gradients are finite")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, including those not reduced yet."""
        super().zero_grad(set_to_none)
        for _, shard in self._shards():
            if shard is None:
                continue
            if set_to_none:
                shard.drop()
            elif self._owned.cut:
                shard.drop_unreduced()
            elif shard.param.grad is not None:
                shard.param.grad.zero_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        given = param_group["params"]
        params = [given] if isinstance(given, torch.Tensor) else list(given)
        self._update.add(params)
        super().add_param_group({**param_group, "params": [_updated(param, self._owned) for param in params]})
        if self._owned.cut:
            _check_same_optimizer(self, self._owned, self._group, self._update.master)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("an optimizer over shards cannot be copied or pickled; keep its state_dict() instead")

    def state_dict(self) -> dict[str, Any]:
        """The state of whole parameters, as the optimizer would have it without shards. A collective: all ranks must
        call it."""
        packed, shards = self.state_in_shards(), self._shards()
        for index, values in packed["state"].items():
            for key, value in values.items():
                if isinstance(value, TensorPart):
                    values[key] = self._owned.whole(cast(Shard, shards[index][1]), value.values)
        return packed

    def state_in_shards(self) -> dict[str, Any]:
        """As `state_dict()`, with this rank's part of sharded entries. All ranks call it."""
        packed = self._state_here()
        self._check_same_state([packed["state"].get(index, {}) for index in range(len(self._shards()))])
        return packed

    def split_state(self) -> tuple[dict[str, Any], dict[int, dict[str, TensorPart]]]:
        """The entries of `state_dict()` that all ranks share, and this rank's parts of the rest, by parameter number.
        No communication."""
        packed, shards = self._state_here(), self._shards()
        parts: dict[int, dict[str, TensorPart]] = {}
        for index, values in packed["state"].items():
            for key, part in [(key, value) for key, value in values.items() if isinstance(value, TensorPart)]:
                if self._owned.cut:
                    parts.setdefault(index, {})[key] = values.pop(key)
                else:
                    values[key] = self._owned.whole(cast(Shard, shards[index][1]), part.values)
        return packed, parts

    def _state_here(self) -> dict[str, Any]:
        packed = super().state_dict()
        shards = [shard for _, shard in self._shards()]
        state: dict[int, dict[str, Any]] = {index: dict(packed["state"].get(index, {})) for index in range(len(shards))}
        for index, shard in enumerate(shards):
            if shard is not None and shard.has_master:
                state[index][MASTER] = shard.value.detach()
        for index, shard in enumerate(shards):
            if shard is None:
                continue
            tensors = {key: value for key, value in state[index].items() if isinstance(value, torch.Tensor)}
            for key, value in tensors.items():
                # The same ones on every rank: a block of one element could be mistaken for a per-parameter value.
                in_shards = key in self._per_element if self._owned.cut else value.shape == shard.value.shape
                if key == MASTER or in_shards:
                    state[index][key] = TensorPart(value, shard.span[0], shard.form)
        return {**packed, "state": {index: values for index, values in state.items() if values}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's part of the state of whole parameters, as returned by `state_dict()` under any placement."""
        state: dict[Any, Any] = dict(state_dict["state"])
        shards = [shard for _, shard in self._shards()]
        for index, shard in enumerate(shards):
            if shard is not None and isinstance(values := state.get(index), dict):
                self._check_fits(shard, values)
                state[index] = {key: self._part(shard, key, value) for key, value in values.items() if key != MASTER}
        super().load_state_dict({**state_dict, "state": state})
        with torch.no_grad():
            for index, shard in enumerate(shards):
                if shard is not None and shard.has_master:
                    master = state_dict["state"].get(index, {}).get(MASTER)
                    shard.value.copy_(shard.block if master is None else self._part(shard, MASTER, master))

    def _part(self, shard: Shard, key: str, value: Any) -> Any:
        """This rank's part of a state of a whole parameter, or a per-parameter value, such as a count of steps."""
        if isinstance(value, TensorPart):
            return value.values
        if not isinstance(value, torch.Tensor) or value.shape != shard.form.shape:
            return value
        return shard.cut(value) if value.ndim or key in self._per_element else value

    def _check_fits(self, shard: Shard, values: Mapping[str, Any]) -> None:
        """Raise, before anything is loaded, if this is the state of another model or of another kind of optimizer."""
        shapes = {
            key: list(value.shape) for key, value in values.items() if isinstance(value, torch.Tensor | TensorPart)
        }
        if strange := [key for key, shape in shapes.items() if shape and shape != list(shard.form.shape)]:
            raise UsageError(
                f"the state to load has {strange[0]} of shape {shapes[strange[0]]} for {shard.name}, which has shape "
                f"{list(shard.form.shape)}; nothing was loaded. Load the state of the same model, with the parameters "
                f"in the same order"
            )
        kept = shapes.keys() - {MASTER}  # which exists before the first step, too
        if self._per_element and kept and self._per_element.isdisjoint(kept):
            raise UsageError(
                f"the state to load has {', '.join(shapes)} for {shard.name}, and {type(self).__name__} keeps "
                f"{', '.join(sorted(self._per_element))}; nothing was loaded. Load the state of the same kind of "
                f"optimizer, or start without one"
            )

    def _check_same_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Ranks are about to gather their states tensor by tensor, so they must hold the same ones."""
        told = [sum(isinstance(value, torch.Tensor | TensorPart) for value in of.values()) for of in state]
        rows = gather_ints(self._group, told, "the state of an optimizer")
        if different := [rank for rank, row in enumerate(rows) if row != rows[0]]:
            raise CollectiveMismatch(
                f"ranks have made different updates with this optimizer: rank {different[0]} keeps state for other "
                f"parameters than rank 0; call optimizer.step() on all ranks alike",
                ranks=different,
            )


@cache
def _sharded(cls: type[Optimizer]) -> type[Optimizer]:
    return type(f"Sharded{cls.__name__}", (ShardedOptimizer, cls), {"__doc__": cls.__doc__})


def _check_elementwise(cls: Any, options: Mapping[str, Any], owned: OwnedBlocks) -> frozenset[str]:
    """Refuse an optimizer that updates a block of a parameter differently from the whole one. Returns the names of what
    it keeps for every element.

    This is tested: two tensors, the halves of a third one, get the same gradients and must end with equal bits.
    """
    like = owned.shards[0].param
    generator = torch.Generator().manual_seed(0)

    def numbers() -> torch.Tensor:
        return torch.randn(8, 64, generator=generator, device="cpu").to(like.device)

    start = numbers()
    whole = nn.Parameter(start.clone())
    halves = [nn.Parameter(half.clone()) for half in start.view(-1).split([192, 320])]
    try:
        of_whole, of_halves = cls([whole], **options), cls(halves, **options)
        for _ in range(3):
            whole.grad = numbers()
            for half, grad in zip(halves, whole.grad.view(-1).split([192, 320]), strict=True):
                half.grad = grad.clone()
            of_whole.step()
            of_halves.step()
    except Exception as error:
        raise _not_elementwise(cls, f"it raised {type(error).__name__}: {error}") from error
    if not torch.equal(torch.cat([half.detach() for half in halves]), whole.detach().view(-1)):
        why = "updating a slice of a tensor gives a different result from slicing the updated tensor"
        raise _not_elementwise(cls, why)
    kept = of_whole.state[whole].items()
    return frozenset(key for key, value in kept if isinstance(value, torch.Tensor) and value.shape == whole.shape)


def _not_elementwise(cls: Any, why: str) -> UsageError:
    name = getattr(cls, "__name__", repr(cls))
    return UsageError(
        f"{name} cannot update blocks of parameters, which a sharded placement needs: {why}. Use an optimizer that "
        f'treats every element by itself, such as Adam, AdamW or SGD, or placement="ddp"'
    )
