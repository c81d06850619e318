"""Parameters that `torch.utils.swap_tensors` has given the contents of other tensors, as `Module.to` may do."""

import operator
from collections.abc import Callable, Sized
from typing import Any

import torch

# A dict that goes with the contents of a tensor when `torch.utils.swap_tensors` gives it those of another. Who keeps it
# can tell later whether that was done. A weak reference would not do: tensors that have one are refused there.
mark_of_contents: Callable[[torch.Tensor], dict[str, Any]] = operator.attrgetter("__dict__")


def install_hooks(param: torch.Tensor) -> Sized:
    """Have autograd run the hooks that are registered: it forgets them when the contents are swapped, and the dict that
    lists them is not told. Returns that dict."""
    param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
    return param._post_accumulate_grad_hooks
