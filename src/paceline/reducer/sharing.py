"""The hooks on the parameters of one replica, and whose turn it is when replicas share a parameter."""

from operator import is_
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from paceline.reducer import autograd
from paceline.reducer.buckets import BucketSet
from paceline.reducer.slot import GradSlot


class Owner(Protocol):
    """Whose method is hooked to the parameters."""

    @property
    def set(self) -> BucketSet: ...

    def on_grad_ready(self, param: torch.Tensor) -> None: ...

    def on_output_backward(self, _: torch.Tensor) -> None: ...


class ParamHooks:
    """Of several replicas that hold a parameter one reduces it: the one that was made, or called, last."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._slots = owner.set.slots
        self._params = [slot.param for slot in self._slots]
        self._handles: list[RemovableHandle] = []
        self._marks: list[dict[str, object]] = []  # see autograd.mark_of_contents
        self._closed = False

    def hang(self) -> None:
        """Hook every parameter. Nothing is done when they are hooked already, nor after `close`."""
        if not self._handles and not self._closed:
            hook = self._owner.on_grad_ready
            self._handles = [param.register_post_accumulate_grad_hook(hook) for param in self._params]
            self._install()
            self.wake()

    def watch_output(self, output: torch.Tensor) -> None:
        """Have the backward that goes through `output` end with a reduction, also when its gradients all come from
        nested backwards, or when it touches no parameter."""
        hook = self._owner.on_output_backward
        if hook not in (output._backward_hooks or {}).values():  # a module may return its input
            output.register_hook(hook)

    def follow_swaps(self) -> None:
        """Hook parameters again that were given other contents, as `torch.utils.swap_tensors` does: the hooks have
        gone with the contents before. Asked in every forward, so it costs little."""
        if not all(map(is_, map(autograd.mark_of_contents, self._params), self._marks)):
            self._install()

    def _install(self) -> None:
        for slot in self._slots:
            slot.hooks = autograd.install_hooks(slot.param)
        self._marks = [autograd.mark_of_contents(param) for param in self._params]

    def shared(self) -> bool:
        """Whether another replica has hooked some of the parameters."""
        return any(self._others(slot) for slot in self._slots if slot.param._post_accumulate_grad_hooks)

    def __bool__(self) -> bool:
        """Whether the parameters are hooked."""
        return bool(self._handles)

    def wake(self) -> None:
        """Take the parameters over from the other replicas that hold them."""
        for slot in self._slots:
            for other in self._others(slot):
                other.asleep = True
                if other.attached():  # its bucket goes on being used, for other parameters
                    slot.param.grad = other.view.clone()
            slot.asleep = False

    def runs_last(self, slot: GradSlot) -> bool:
        """Whether our hook runs after all hooks of the user's, so that these see the gradient and may change it.

        If not, it is moved behind them, for the next backward.
        """
        if list(autograd.hook_owners(slot.param))[-1] is self._owner:
            return True
        self._handles[slot.index].remove()
        self._handles[slot.index] = slot.param.register_post_accumulate_grad_hook(self._owner.on_grad_ready)
        return False

    def close(self) -> None:
        """Remove every hook, and leave shared parameters to the replica that was made last before this one."""
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for slot in self._slots:
            others = self._others(slot)
            if others and not slot.asleep:
                others[-1].asleep = False

    def _others(self, slot: GradSlot) -> list[GradSlot]:
        """The places that other replicas have for the same parameter."""
        owners = autograd.hook_owners(slot.param)
        return [
            owner.set.slot_of[id(slot.param)]
            for owner in owners
            if isinstance(owner, type(self._owner)) and owner is not self._owner
        ]
