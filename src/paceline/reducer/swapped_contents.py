"""Parameters that `torch.utils.swap_tensors` has given the contents of other tensors, as `Module.to` may do."""

import operator
from collections.abc import Callable, Sized
from typing import Any

import torch

# A dict that moves with the contents of a tensor in `torch.utils.swap_tensors`, so that a swap can be detected later. A
# weak reference would not work, because tensors with weak references cannot be swapped.
mark_of_contents: Callable[[torch.Tensor], dict[str, Any]] = operator.attrgetter("__dict__")


def install_hooks(param: torch.Tensor) -> Sized:
    """Make autograd run the registered hooks: it forgets them when the contents are swapped, and the dict that
    lists them does not change. Returns that dict."""
    param._post_accumulate_grad_hooks = param._post_accumulate_grad_hooks
    return param._post_accumulate_grad_hooks
