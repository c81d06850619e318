"""A unit: some parameters of which each rank holds a block, and the memory into which they are gathered.

Note: how memory is freed and restored under autograd
----------------------------------------------
Autograd keeps what backward needs: the parameter itself, or views of its storage. So a parameter is freed by taking the
memory from its storage, and gathered by giving the same storage memory again, where all references find the values.
The values are written through a tensor with a version counter of its own, because nothing has changed for autograd.
While it is freed, the parameter shows NaN, and the module holds a stand-in that raises when it is used.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from paceline.collectives.block_gather import BlockGather
from paceline.collectives.group import Group
from paceline.errors import UnreducedGradients
from paceline.reducer.shard import Shard, flat_of
from paceline.trace import Trace

Place = tuple[nn.Module, str]  # a module, and the name under which it has a parameter


def places_of(module: nn.Module) -> dict[int, list[Place]]:
    """The modules and names that hold each parameter, by its id; a shared one has several."""
    found: dict[int, list[Place]] = {}
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None:
                found.setdefault(id(param), []).append((owner, name))
    return found


class Whole:
    """One parameter as a whole, which exists temporarily."""

    def __init__(self, shard: Shard, places: Sequence[Place]) -> None:
        self.shard = shard
        self._nbytes = shard.param.nbytes
        storage = shard.param.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self._nbytes)
        elif storage.nbytes() != self._nbytes:  # not freed: others view it too
            shard.param.data = shard.param.data.clone()
        self.full = shard.param.data
        self._places = places
        self._nan = torch.full((), torch.nan, dtype=self.full.dtype, device=self.full.device).expand(self.full.shape)

    def free(self) -> None:
        self._put(self.shard.front, instead_of=self.shard.param)
        self.full.untyped_storage().resize_(0)
        self.shard.param.data = self._nan

    def allocate(self) -> None:
        if not self.full.untyped_storage().nbytes():
            self.full.untyped_storage().resize_(self._nbytes)

    def show(self) -> None:
        self._put(self.shard.param, instead_of=self.shard.front)
        self.shard.param.data = self.full

    def _put(self, param: Any, *, instead_of: Any) -> None:
        for module, name in self._places:
            if module._parameters[name] is not instead_of and module._parameters[name] is not param:
                raise UnreducedGradients(
                    f"{self.shard.name} was replaced after wrapping, as load_state_dict(assign=True) does, so it would "
                    f"not be trained; copy values into the parameter inside `with model.whole():`, or wrap the module "
                    f"after such a change"
                )
            module._parameters[name] = param


class Unit:
    """Some parameters that are gathered and freed together."""

    def __init__(
        self, name: str, number: int, wholes: Sequence[Whole], cuts: Sequence[Sequence[int]], trace: Trace
    ) -> None:
        """`cuts`: of each parameter, one block per rank. `trace`: where gathers leave stamps."""
        self.name = name
        self._trace = trace
        self._wholes = list(wholes)
        self._device = next((whole.full.device for whole in wholes), torch.device("cpu"))
        self.gathered = True
        self._number = number
        self._cut(cuts)

    def _cut(self, cuts: Sequence[Sequence[int]]) -> None:
        wholes = self._wholes
        by_type: dict[torch.dtype, list[int]] = {}
        for at, whole in enumerate(wholes):
            if not whole.full.numel():
                continue
            by_type.setdefault(whole.full.dtype, []).append(at)
        self._gathers = []
        for some in by_type.values():
            flats = [flat_of(wholes[at].full) for at in some]
            spans = zip(*(pairwise(cuts[at]) for at in some), strict=True)
            blocks = [
                [flat[begin:end] for flat, (begin, end) in zip(flats, own, strict=True) if end > begin] for own in spans
            ]
            homes = [wholes[at].shard.block for at in some]
            own = [home for home in homes if home.numel()]
            self._gathers.append(BlockGather(own, blocks, self._number, self._trace, self.name))

    def cut_anew(self, cuts: Sequence[Sequence[int]]) -> None:
        """The shards own other blocks, or come from other ranks."""
        self._allocate()
        self._cut(cuts)
        self._free()

    @property
    def params(self) -> list[nn.Parameter]:
        return [whole.shard.param for whole in self._wholes]

    def start(self, group: Group) -> None:
        """Start to gather the parameters, unless they are present. In shared memory they are read in place, so the
        memory for them must be allocated already."""
        if self.gathered:
            return
        if group.transport.traits(self._device).sharded:
            self._allocate()
        for gather in self._gathers:
            gather.start(group)

    def _allocate(self) -> None:
        for whole in self._wholes:
            whole.allocate()

    def gather(self, group: Group) -> None:
        """Gather the parameters. All ranks call it, for the same units in the same order."""
        if self.gathered:
            return
        self.start(group)
        self._allocate()
        for whole in self._wholes:
            whole.show()
        self.gathered = True
        try:
            with torch.no_grad():
                for gather in self._gathers:
                    gather.finish(group, f"the parameters of {self.name}")
        except BaseException:
            self.free()  # after an interrupt it may be tried again
            raise

    def free(self) -> None:
        if self.gathered:
            self._free()

    def _free(self) -> None:
        for whole in self._wholes:
            whole.free()
        self.gathered = False

    def discard(self) -> None:
        """Free the parameters, and drop communication over a group that has ended."""
        for gather in self._gathers:
            gather.forget()
        self._free()

    def follow_update(self, group: Group) -> None:
        """Free the parameters, and drop gathers in progress: the shards have new values."""
        for gather in self._gathers:
            gather.discard(group)
            gather.version += 1
        self._free()

    def keep_changes(self) -> None:
        """Store changes that were made to the whole parameters."""
        for whole in self._wholes:
            if whole.shard.param.data_ptr() != whole.full.data_ptr():  # as `param.data = ...` has done
                whole.full.copy_(whole.shard.param.data)
                whole.shard.param.data = whole.full
            whole.shard.block.copy_(flat_of(whole.full)[slice(*whole.shard.span)])
