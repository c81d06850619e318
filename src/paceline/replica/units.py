"""Parameters in shards: they are gathered by unit when the unit is needed, and freed afterwards.

    forward    gather 0 ─ run 0 ─ free 0 ─ gather 1 ─ run 1 ─ free 1 …          the next one is fetched while one runs
    backward   … gather 1 ─ its gradients ─ free 1 ─ gather 0 ─ its gradients ─ free 0

Parameters outside all units form the root: it is gathered when forward begins, and freed when backward has ended. What
a unit computes from its parameters must be part of the result of its forward: backward could not be tracked through
anything else.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.collectives.protocols import Transport
from paceline.collectives.subgroup import Subgroup
from paceline.errors import IllegalMove, PacelineError
from paceline.reducer.autograd import task_id, tensors_in
from paceline.reducer.shard import Shard
from paceline.replica.module_hook import ModuleHook
from paceline.replica.unit import Unit, Whole, places_of
from paceline.trace import Trace

FAILED = (
    'a backward under placement="zero3" has ended with an exception while the other ranks gathered parameters with '
    "this one, so training cannot go on; restart all ranks from a checkpoint"
)


class _WhenAllHaveGrads:
    """Calls a function in every backward that reaches all of some tensors, until it returns True.

    torch's register_multi_grad_hook holds the graph that holds it: neither would ever be freed.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], then: Callable[[], bool]) -> None:
        self._then = then
        self._task, self._missing = -1, 0
        self._hooks = [tensor.register_hook(self._on_grad) for tensor in {id(one): one for one in tensors}.values()]

    def _on_grad(self, _: torch.Tensor) -> None:
        if self._task != task_id():
            self._task, self._missing = task_id(), len(self._hooks)
        self._missing -= 1
        if not self._missing and self._then():
            for hook in self._hooks:
                hook.remove()


class Units:
    """The units of one replica, and the hooks that gather and free them."""

    def __init__(
        self,
        module: nn.Module,
        modules: Sequence[nn.Module],
        units: Sequence[Unit],
        indices: Sequence[Sequence[int]],
        group: Subgroup,
    ) -> None:
        """`units`: one for each of `modules`, and one more for the root. `indices`: of their parameters."""
        self.group = group
        self._module, self._modules = module, list(modules)
        self.indices = indices
        self._units = list(units)
        self._root = units[-1]
        self._last: list[Unit] = []  # in the order in which the last forward ran them
        self._running: list[Unit] = []  # units run so far in this forward
        self._open = 0  # how many `whole()` blocks are open
        self._left_in_shards = False  # by state_dict() and load_state_dict() of the module
        self._failed = False
        self._outlives = False  # its ranks: see `outlive`
        self._lost: PacelineError | None = None  # why parameters gathered before an update could not be freed in time
        self._hooks: list[RemovableHandle] = []
        self.hook()
        self.follow_update()

    def hook(self) -> None:
        """Gather and free parameters around every module, until `close()`."""
        module, modules, units = self._module, self._modules, self._units
        for owner, unit in [*zip(modules, units[:-1], strict=True), (module, self._root)]:
            before = ModuleHook(self._before_forward, unit)
            self._hooks.append(owner.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._hooks.append(owner.register_forward_hook(ModuleHook(self._after_forward, unit), always_call=True))
        self._hooks += [
            module.register_state_dict_pre_hook(ModuleHook(self._open_whole)),
            module.register_state_dict_post_hook(ModuleHook(self._after_state)),
        ]
        for owner, unit in [*zip(modules, units[:-1], strict=True), (module, self._root)]:  # one after another
            self._hooks.append(owner.register_load_state_dict_pre_hook(ModuleHook(self._open_unit, unit)))
            self._hooks.append(owner.register_load_state_dict_post_hook(ModuleHook(self._close_unit, unit)))

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # ---- in an elastic job

    def outlive(self) -> None:
        """Training survives the loss of ranks: a loss does not interrupt an update, and the next use of parameters
        raises the error."""
        self._outlives = True

    def discard(self) -> None:
        """The group has ended: drop communication in progress."""
        for unit in self._units:
            unit.discard()
        self._last, self._running, self._open = [], [], 0

    def move(self, transport: Transport, ranks: Sequence[int]) -> None:
        """Gather over another transport, among these ranks."""
        self.group.move(transport)
        self.group.ranks = ranks
        self._failed, self._lost = False, None

    def cut_anew(self, cuts: Sequence[Sequence[int]]) -> None:
        """The shards own other blocks, or come from other ranks. `cuts`: of each parameter, one block per rank."""
        for unit, some in zip(self._units, self.indices, strict=True):
            unit.cut_anew([cuts[index] for index in some])

    # ---- a step

    def _before_forward(self, unit: Unit, _: nn.Module, *inputs: Any) -> None:
        if self._failed:
            raise IllegalMove(FAILED)
        self._gather(unit)
        tensors = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
        if tensors and torch.is_grad_enabled() and unit is not self._root:
            _WhenAllHaveGrads(tensors, partial(self._after_backward, unit))
        if task_id() != -1:
            return  # computed again inside a backward
        if unit is self._root:
            self._last, self._running = self._running, []
        self._running.append(unit)
        if len(self._running) < len(self._last):
            self._last[len(self._running)].start(self.group)

    def _after_forward(self, unit: Unit, _: nn.Module, __: Any, output: Any) -> None:
        if task_id() != -1:
            return  # the backward that recomputed it is about to use it
        tensors = list(tensors_in(output))
        if not tensors and output is not None and torch.is_grad_enabled():
            return  # inside an opaque module, where backward cannot be tracked, so keep it gathered
        watched = [tensor for tensor in tensors if tensor.grad_fn is not None]
        for tensor in watched if torch.is_grad_enabled() else ():
            tensor.register_hook(partial(self._before_backward, unit))
            if (base := tensor._base) is not None and base.grad_fn is not None:
                base.register_hook(partial(self._before_backward, unit))  # a change of the view replaces it
        if unit is not self._root or not watched:
            self._free(unit)

    def _before_backward(self, unit: Unit, _: torch.Tensor) -> None:
        """Backward has reached an output of the unit."""
        unit.gather(self.group)
        for earlier, later in pairwise(self._running):
            if later is unit:
                earlier.start(self.group)

    def _after_backward(self, unit: Unit) -> bool:
        """The inputs of a unit have their gradients, so its backward is complete. Returns whether that was the
        last of it: with create_graph=True a backward through this one needs it again."""
        if torch.is_grad_enabled():
            return False
        self._free(unit)
        return True

    def end_backward(self) -> None:
        """No more gradients will come."""
        for unit in self._units:
            self._free(unit)

    def fail(self) -> None:
        """A backward has ended with an exception. The other ranks wait for gathers that will not come: all must end."""
        self._failed = True
        self.group.close()
        raise IllegalMove(FAILED)

    def follow_update(self) -> None:
        """The shards have new values, and gathered parameters are stale."""
        for unit in self._units:
            try:
                unit.follow_update(self.group)
                if self._open:
                    unit.gather(self.group)
            except PacelineError as error:
                if not self._outlives:
                    raise
                self._lost = error
                unit.discard()

    def _gather(self, unit: Unit) -> None:
        if self._lost is not None:
            raise copy.copy(self._lost)
        unit.gather(self.group)

    def _free(self, unit: Unit) -> None:
        if not self._open:
            unit.free()

    # ---- whole parameters

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather all parameters, and keep changes to them. All ranks enter it."""
        self._open_whole()
        try:
            yield
        finally:
            self._close_whole()

    @contextmanager
    def in_shards(self) -> Iterator[None]:
        """Inside, the module's state_dict() and load_state_dict() skip sharded parameters."""
        self.keep_changes()
        self._left_in_shards = True
        try:
            yield
        finally:
            self._left_in_shards = False

    def _open_whole(self, *_: Any) -> None:
        if self._left_in_shards:
            return
        for unit in self._units:
            self._gather(unit)
        self._open += 1

    def _close_whole(self, *_: Any) -> None:
        if self._left_in_shards:
            return
        self.keep_changes()
        self._open -= 1
        for unit in self._units:
            self._free(unit)

    def fill(self, write: Callable[[Unit, Sequence[nn.Module]], None]) -> None:
        """Write parameters unit by unit, with the modules of each unit; the root comes last. All ranks call it.
        The root stays gathered throughout: units may share its parameters."""
        inside = [list(owner.modules()) for owner in self._modules]
        rest = set(self._module.modules()).difference(*inside)
        done: set[nn.Module] = set()
        self._open_unit(self._root)
        # Inner units first, so that each module belongs to the unit that holds its parameters.
        for unit, modules in sorted(zip(self._units[:-1], inside, strict=True), key=lambda pair: len(pair[1])):
            self._open_unit(unit)
            write(unit, [owner for owner in modules if owner not in done])
            done.update(modules)
            self._close_unit(unit)
        write(self._root, list(rest))
        self._close_unit(self._root)

    def _open_unit(self, unit: Unit, *_: Any) -> None:
        if not self._left_in_shards:
            self._gather(unit)

    def _close_unit(self, unit: Unit, *_: Any) -> None:
        if self._left_in_shards:
            return
        with torch.no_grad():
            unit.keep_changes()
        self._free(unit)

    def keep_changes(self) -> None:
        """Store changes to parameters that were gathered as a whole."""
        if self._open:
            with torch.no_grad():
                for unit in self._units:
                    unit.keep_changes()

    def _after_state(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """The memory of parameters is about to be freed: copy the entries that were read from them."""
        if self._left_in_shards:
            return
        for key, value in state.items():
            if key.startswith(prefix) and isinstance(value, torch.Tensor):
                state[key] = value.clone()
        self._close_whole()


def make_units(
    module: nn.Module,
    modules: Sequence[nn.Module],
    indices: Sequence[Sequence[int]],
    shards: Sequence[Shard],
    cuts: Sequence[Sequence[int]],
    group: Subgroup,
    trace: Trace,
) -> Units:
    """`indices`: of the parameters of each of `modules`, and last of the root."""
    places = places_of(module)
    names = {id(owner): name for name, owner in module.named_modules()}
    units = []
    for number, some in enumerate(indices):
        name = names[id(modules[number])] if number < len(modules) else "the root of the model"
        wholes = [Whole(shards[index], places[id(shards[index].param)]) for index in some]
        units.append(Unit(name, number, wholes, [cuts[index] for index in some], trace))
        units[-1].free()
    return Units(module, modules, units, indices, group)
