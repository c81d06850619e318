"""Models that start on the meta device, where tensors have shapes but no memory.

Tensors on meta get memory on the device of the rank, and values from the modules' reset_parameters(): each module sets
its own, with random numbers that follow from one seed of rank 0 and the module's position in the model. Rank 0's values
then go to all ranks. If parameters are sharded, this is done unit by unit, so no rank ever holds more than a unit and
its shards. What no reset_parameters() sets must be loaded before the first forward.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.collectives.gather import gather_ints, gather_unless_equal
from paceline.collectives.group import Group
from paceline.collectives.own_group import backend_name
from paceline.errors import UsageError
from paceline.randomness import mixed, put_back, seed_all
from paceline.replica.owned import OwnedBlocks
from paceline.replica.start_equal import broadcast_values
from paceline.replica.unit import Unit


def device_of(module: nn.Module, device_ids: Sequence[Any] | None, group: Any) -> torch.device:
    """The device for a module on meta: that of its other parts, else the device on which ranks compute."""
    if device_ids:
        return torch.device("cuda", torch._utils._get_device_index(device_ids[0], True))
    tensors = chain(module.parameters(), module.buffers())
    if (found := next((tensor.device for tensor in tensors if not tensor.is_meta), None)) is not None:
        return found
    on_cuda = torch.cuda.is_available() and isinstance(group, dist.ProcessGroup)
    if on_cuda and backend_name(group, torch.device("cuda")) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def begin(replica: Any) -> "FromMeta | None":
    """Replace parameters and buffers on meta by ones on the device. Returns None if there are none. All ranks call
    it."""
    module, ignored = replica.module, replica.parameters_to_ignore
    named = chain(module.named_parameters(), module.named_buffers())
    if not any(tensor.is_meta and name not in ignored for name, tensor in named):
        return None
    found = FromMeta(module, ignored, replica._start_device, replica._group)
    found.allocate(in_shards=replica._placement.shards_parameters and not replica._group.single)
    return found


def fill(replica: Any) -> None:
    """Initialize what was on meta, equally on all ranks. All ranks call it."""
    if replica._from_meta is not None:
        replica._from_meta.fill(replica)
        replica._from_meta = None


class FromMeta:
    """The parts of a module that were on meta when it was wrapped."""

    def __init__(self, module: nn.Module, ignored: Collection[str], device: torch.device, group: Group) -> None:
        """All ranks call it."""
        self._device = device
        self._group = group
        self._seed = gather_ints(group, [int(torch.randint(1 << 62, (), device="cpu"))], "a seed for parameters")[0][0]
        self._begun: dict[int, torch.Tensor] = {}  # the tensors that replaced those on meta, by id
        self._places: list[tuple[int, nn.Module]] = []  # the modules that hold some of them, by number
        self._first: dict[int, tuple[str, nn.Module]] = {}  # the name in the model, and the first module that holds it
        self._unset: dict[int, int] = {}  # versions of buffers that have not been written to
        self._replace(module, ignored)

    def _replace(self, module: nn.Module, ignored: Collection[str]) -> None:
        """Replace parameters and buffers on meta by ones on the device; shared ones stay shared. Parameters have
        no memory yet."""
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for number, (prefix, owner) in enumerate(module.named_modules(remove_duplicate=True)):
            tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
            for table in tables:
                for name, old in table.items():
                    full = f"{prefix}.{name}" if prefix else name
                    if old is None or not old.is_meta or is_lazy(old) or full in ignored:
                        continue
                    if id(old) not in made:
                        made[id(old)] = old, self._new(old)
                    _, table[name] = made[id(old)]
                    self._begun[id(table[name])] = table[name]
                    self._first.setdefault(id(table[name]), (full, owner))
                    if not self._places or self._places[-1][1] is not owner:
                        self._places.append((number, owner))

    def _new(self, old: torch.Tensor) -> torch.Tensor:
        data = torch.empty_strided(old.size(), old.stride(), dtype=old.dtype, device=self._device)
        if not isinstance(old, nn.Parameter):
            return data.zero_()
        data.untyped_storage().resize_(0)
        made = nn.Parameter(data, requires_grad=old.requires_grad)
        made.__dict__.update(old.__dict__)
        return made

    def has(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._begun

    def allocate(self, *, in_shards: bool) -> None:
        """Allocate what this rank will hold in full."""
        for param in self._begun.values():
            if not (in_shards and param.requires_grad) and not (storage := param.untyped_storage()).nbytes():
                storage.resize_(param.nbytes)

    def reset(self, modules: Iterable[nn.Module]) -> None:
        """Let `modules` initialize their tensors."""
        wanted = set(map(id, modules))
        with torch.no_grad(), put_back(self._device):
            for number, owner in reversed(self._places):  # children before parents, as during construction
                if id(owner) in wanted:
                    seed_all(mixed(self._seed, number), self._device)
                    self._reset_one(owner)

    def _reset_one(self, owner: nn.Module) -> None:
        own = [one for one in (*owner._parameters.values(), *owner._buffers.values()) if one is not None]
        new = [one for one in own if self.has(one) and self._first[id(one)][1] is owner]
        # Existing tensors keep their values, and shared ones get those of their first module.
        kept = [(one, one.clone()) for one in own if not any(one is other for other in new)]
        for tensor in new:
            if isinstance(tensor, nn.Parameter):
                tensor.data.fill_(torch.nan if tensor.is_floating_point() else 0)
            else:
                self._unset[id(tensor)] = tensor._version
        if (function := _reset_of(owner)) is not None:
            function()
        for tensor, value in kept:
            tensor.copy_(value)

    def fill(self, replica: Any) -> None:
        """See the function of this name."""
        owned: OwnedBlocks | None = replica._owned
        units = None if owned is None else owned.units
        if units is None:
            self.reset(owner for _, owner in self._places)
            broadcast_values(list(self._begun.values()), self._group)
        else:
            units.fill(self._fill_unit)
            rest = [tensor for tensor in self._begun.values() if owned is None or owned.find(tensor) is None]
            broadcast_values(rest, self._group)
        self._require_values(replica.module, None if units is None else owned)

    def _fill_unit(self, unit: Unit, modules: Sequence[nn.Module]) -> None:
        self.reset(modules)
        broadcast_values([param for param in unit.params if self.has(param)], self._group)

    # ---- what must be loaded

    def _require_values(self, module: nn.Module, owned: OwnedBlocks | None) -> None:
        """Raise in the first forward if some tensor still has no values."""

        def tensor_here(param: torch.Tensor) -> torch.Tensor:
            shard = None if owned is None else owned.find(param)
            return param.detach() if shard is None else shard.block

        def lacking() -> list[str]:
            """The names of tensors without values, on any rank."""
            begun, there = self._begun, dict(module.named_buffers(remove_duplicate=False))
            params = [one for one in begun.values() if isinstance(one, nn.Parameter) and one.is_floating_point()]
            found = [self._first[id(param)][0] for param in params if bool(tensor_here(param).isnan().any())]
            for at, version in self._unset.items():
                name = self._first[at][0]
                if there.get(name) is begun[at] and begun[at]._version == version:
                    found.append(name)
            if owned is None:  # all ranks hold the same
                return found
            told = gather_unless_equal(self._group, found, "which parameters have no values") or [found]
            return list(dict.fromkeys(name for names in told for name in names))

        if not lacking():
            return

        def check(_: nn.Module, __: Any) -> None:
            if found := lacking():
                raise UsageError(self._error(module, found))
            handle.remove()

        handle = module.register_forward_pre_hook(check, prepend=True)

    def _error(self, module: nn.Module, names: Sequence[str]) -> str:
        owner = module.get_submodule(names[0].rpartition(".")[0])
        kind = type(owner).__name__
        lacks = "has no reset_parameters()" if _reset_of(owner) is None else "has a reset_parameters() that leaves it"
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return (
            f"{names[0]}{more} began on the meta device and has no values: {kind} {lacks}, and nothing was loaded into "
            f"it. Load a checkpoint before the first forward, give {kind} a reset_parameters() that sets it, or build "
            f"it on {self._device}"
        )


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """The method that initializes a module: torch has two names for it."""
    found = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return found if callable(found) else None
