"""Parameters that were added or unfrozen after a module was wrapped, whose gradients are not reduced.

They may be in no optimizer at all, because `model.optimizer(cls)` only has those that existed at wrapping. Then they
would get gradients, differ from rank to rank, and never be updated. A plain step checks nothing: a walk through the
module follows only when some module of the process was given a parameter or a module, or when one of this module's
frozen parameters was unfrozen.
"""

import threading
import weakref
from collections.abc import Collection, Container, Iterable, Sequence

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from paceline.errors import UnreducedGradients
from paceline.replica.owned import OwnedBlocks
from paceline.replica.refusals import listed

COMPILED = "_orig_mod."  # what torch.compile puts into the names of parameters


class Strangers:
    """Refuses the gradients of such parameters, for one replica."""

    def __init__(self, managed: frozenset[int], ignored: Container[str], others: Iterable[torch.Tensor]) -> None:
        """`managed`: the ids of the parameters whose gradients are reduced. `others`: those without gradients when the
        module was wrapped."""
        self.managed = managed
        self._ignored = ignored
        self._frozen = tuple(map(weakref.ref, others))
        self._registered = True
        self.possible = True  # whether to check at all before a step
        registrations.add(self)

    def note_registration(self) -> None:
        self._registered = self.possible = True

    def refuse(self, module: nn.Module | None, owned: OwnedBlocks | None) -> None:
        """Raise if parameters of `module` have gradients that are not reduced. Those that `owned` knows are reduced."""
        if not self._registered and not any(
            (param := one()) is not None and param.requires_grad for one in self._frozen
        ):
            return
        self._registered = False  # before the check: another thread may register something meanwhile
        named = () if module is None else module.named_parameters()
        found = {
            name: param
            for name, param in named
            if param.requires_grad
            and id(param) not in self.managed
            and (owned is None or owned.find(param) is None)
            and name.replace(COMPILED, "") not in self._ignored
        }
        if names := [name for name, param in found.items() if param.grad is not None]:
            self._registered = True
            raise _not_reduced(names)
        self._registered = self._registered or bool(found)  # they may have gradients later
        self.possible = self._registered or bool(self._frozen)

    def refuse_among(self, params: Sequence[torch.Tensor], module: nn.Module | None) -> None:
        """Raise if an optimizer is about to update some of them."""
        named = () if module is None else module.named_parameters()
        names = {id(p): name for name, p in named if name not in self._ignored}
        found = [names[id(p)] for p in params if id(p) in names and id(p) not in self.managed and p.grad is not None]
        if found:
            raise _not_reduced(found)


def _not_reduced(names: Collection[str]) -> UnreducedGradients:
    return UnreducedGradients(
        f"{listed(list(names))} became trainable, or took another parameter's place, after wrapping, so their "
        f"gradients are not reduced; wrap the module again after such a change, or pass guard=False"
    )


class _Registrations:
    """Tells all replicas of this process when a module gets a parameter or a module: torch has one list of hooks for
    all modules, which holds two of paceline's for the life of the process."""

    def __init__(self) -> None:
        self._told: weakref.WeakSet[Strangers] = weakref.WeakSet()
        self._lock = threading.RLock()  # garbage collection may create a module meanwhile
        self._hooked = False

    def add(self, strangers: Strangers) -> None:
        with self._lock:
            self._told.add(strangers)
            if not self._hooked:
                register_module_parameter_registration_hook(self._tell)
                register_module_module_registration_hook(self._tell)
                self._hooked = True

    def _tell(self, module: nn.Module, name: str, registered: object) -> None:
        with self._lock:
            for strangers in self._told:
                strangers.note_registration()


registrations = _Registrations()
