"""Under "zero1" and "zero2": updated parameters are gathered from other ranks while this rank continues.

    step()   update the own blocks ─ start all gathers ─┐
    forward                               unit 0 waits ─ runs ─ unit 1 waits ─ runs …

Every rank starts the same gathers at the end of the same step, in the order in which modules were registered. Nothing
that follows may read a parameter before its values have arrived.

Note: what waits for a gather
----------------------------
Modules do, whole units at a time, before their forward: so their code, in Python or C++, sees nothing unusual. Any
other use of a parameter from Python waits too: see `pending_parameter.py`. Uses that neither of these would detect are
handled in advance. A parameter is gathered inside the step if another object refers to its memory, such as an earlier
view, or if it belongs to opaque code: a ScriptModule, a compiled module, a CUDA graph. All parameters are, if the
calling thread itself moves the bytes, which then saves nothing, and once something has been compiled since the replica
was created.
"""

import copy
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.collectives.group import Group
from paceline.errors import PacelineError
from paceline.placement import find_units
from paceline.replica.module_hook import ModuleHook
from paceline.replica.untraced import before_compiling, frames_compiled
from paceline.replica.update_gather import GatherState, UpdateGather
from paceline.strategies.multi_step import SideStream

logger = logging.getLogger("paceline")

LAST_WAIT_S = 5.0  # of a rank that ends with an error, for outstanding messages between ranks


class UpdateGathers:
    """The gathers of one replica. Holds no module: a module may hold the replica."""

    def __init__(self, module: nn.Module, group: Group, device: torch.device) -> None:
        self._module = weakref.ref(module)
        self._group = group
        self._device = device
        self._side = SideStream()
        self._gathers: list[UpdateGather] = []
        self._waiting: list[tuple[weakref.ref[nn.Module], list[UpdateGather]]] = []
        self._hooks: list[RemovableHandle] = []
        self._lock = threading.RLock()
        self._thread = 0  # the thread that makes the updates
        self._compiled_before = frames_compiled()
        self._replayed = False  # parts of the module may run without module hooks
        self._heeds_compiling: Callable[[], None] | None = None
        self._outlives = False  # its ranks: see `outlive`
        self._lost: PacelineError | None = None  # why parameters lack updates of other ranks

    def gather(self, gathers: Sequence[UpdateGather]) -> None:
        """Use these gathers from now on: the previous ones refer to memory that parameters no longer have."""
        self._gathers = list(gathers)
        module = self._module()
        self._waiting = [] if module is None else _who_waits(module, self._gathers)

    # ---- in an elastic job

    def outlive(self) -> None:
        """Training survives the loss of ranks: a loss does not interrupt an update, and the next use of a parameter
        raises the error. Missing values are gathered in the next generation."""
        self._outlives = True

    def move(self, group: Group) -> bool:
        """Continue with another group: drop gathers in progress. Returns whether parameters may lack updates of other
        ranks. On a device that is unknown: a queued gather counts as done, but may have been interrupted."""
        with self._lock:
            lacks = self._lost is not None or any(gather.state is not GatherState.DONE for gather in self._gathers)
            for gather in self._gathers:
                gather.forget()
            self._unhook()
            self._group, self._lost = group, None
        return lacks or self._device.type == "cuda"

    # ---- after an update

    def follow_update(self) -> None:
        """After an update of this rank's blocks: gather those of all ranks, at once or as soon as they are used. All
        ranks call it."""
        try:
            self._follow_update()
        except PacelineError as error:
            if not self._outlives:
                raise
            with self._lock:
                self._lost = error
                for gather in self._gathers:
                    gather.lose(error, self._wait_for)

    def _follow_update(self) -> None:
        module = self._module()
        if module is None or not self._can_wait():
            self.gather_now()
            return
        for gather, following in zip_longest(self._gathers, self._gathers[1:]):
            if self._group.transport.traits(self._device).stream_ordered:
                gather.queue(self._group, self._side, following)
            else:
                gather.start(self._group)
        self._thread = threading.get_ident()
        opaque = _opaque_parameters(module)
        with self._lock:
            for gather in self._gathers:
                if gather.unseen(opaque):
                    gather.finish(self._group)
                else:
                    gather.make_pending(self._wait_for)
            self._hook()

    def _can_wait(self) -> bool:
        """Whether waiting later gains anything, and every use would be detected."""
        traits = self._group.transport.traits(self._device)
        if traits.single or traits.progress_on_caller:
            return False
        self._replayed = self._replayed or frames_compiled() != self._compiled_before
        return not self._replayed and not self._captures()

    def _captures(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def gather_now(self) -> None:
        """Gather the blocks of all ranks now. All ranks call it. Two at a time, to limit memory."""
        for gather, following in zip_longest(self._gathers, self._gathers[1:]):
            if gather.state is GatherState.DONE:
                gather.start(self._group)
            if following is not None:
                following.start(self._group)
            gather.finish(self._group)

    def _hook(self) -> None:
        """Only while something is pending: modules with hooks are compiled and captured differently."""
        if not any(gather.state is GatherState.PENDING for gather in self._gathers):
            return
        for owner, gathers in self._waiting:
            if (module := owner()) is None:  # it was replaced
                continue
            if module is self._module() or any(gather.state is GatherState.PENDING for gather in gathers):
                hook = ModuleHook(self._before_forward, gathers)
                self._hooks.append(module.register_forward_pre_hook(hook, prepend=True))
        self._heeds_compiling = before_compiling(self._before_compiling)

    # ---- when a parameter is used

    def wait(self) -> None:
        """Wait for the values of all parameters."""
        self._wait_for(*self._gathers)

    def before_forward(self) -> None:
        """The replica is about to run. A captured CUDA graph will run again without this code."""
        if self._lost is not None:
            raise copy.copy(self._lost)
        self._replayed = self._replayed or self._captures()

    def _wait_for(self, *gathers: UpdateGather) -> None:
        if all(gather.state is GatherState.DONE for gather in gathers):
            return
        with self._lock:
            self.before_forward()
            for gather in gathers:
                gather.finish(self._group)
            if all(gather.state is GatherState.DONE for gather in self._gathers):
                self._unhook()

    def _before_forward(self, gathers: Sequence[UpdateGather], module: nn.Module, _: Any) -> None:
        # Evaluation may choose kernels by the class of parameters, also in nested modules.
        self._wait_for(*(gathers if module.training else self._gathers))

    def _before_compiling(self, _: Any) -> None:
        self._replayed = True
        self.wait()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._heeds_compiling is not None:
            self._heeds_compiling()
            self._heeds_compiling = None

    def close(self) -> None:
        """The replica is released, and soon its group: complete outstanding messages between ranks, as the step
        would have done. After an error, which others may not survive, wait only briefly."""
        failed = hasattr(sys, "last_value")
        # Python may release a replica on any thread, such as that of another rank, where it cannot wait.
        waits = threading.get_ident() == self._thread
        until = time.monotonic() + (LAST_WAIT_S if waits else 0.0)
        with self._lock:
            for gather in self._gathers:
                try:
                    if gather.state is not GatherState.PENDING:
                        continue
                    if (waits and not failed) or gather.comes(self._group, until - time.monotonic()):
                        gather.finish(self._group)
                except PacelineError as error:
                    logger.warning("a replica was released before its last update was complete: %s", error)
            self._unhook()


def _who_waits(
    module: nn.Module, gathers: Sequence[UpdateGather]
) -> list[tuple["weakref.ref[nn.Module]", list[UpdateGather]]]:
    """The modules that wait before their forward, with their gathers: a unit for all of its parameters, the module
    itself, and others for their own."""
    of = {id(param): gather for gather in gathers for param in gather.params}
    units = set(find_units(module, None))
    inside = {inner for unit in units for inner in unit.modules()} - units
    found = []
    for owner in module.modules():
        if owner in inside:
            continue
        params = owner.parameters() if owner in units else owner._parameters.values()
        needed = {id(param): of[id(param)] for param in params if id(param) in of}
        if needed or owner is module:
            found.append((weakref.ref(owner), list(dict.fromkeys(needed.values()))))
    return found


def _opaque_parameters(module: nn.Module) -> set[int]:
    """The ids of parameters in modules that run as a whole, so that uses are not detected."""
    compiled: Any = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    whole = (torch.jit.ScriptModule, compiled)
    found: set[int] = set()
    left = [module]
    while left:
        one = left.pop()
        graphed = "forward" in one.__dict__ and "make_graphed" in getattr(one.forward, "__qualname__", "")
        if graphed or one._compiled_call_impl is not None or isinstance(one, whole):
            found.update(map(id, one.parameters()))
        else:
            left += [child for child in one._modules.values() if child is not None]
    return found
