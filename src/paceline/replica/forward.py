"""A forward of the replica: the work before and after the module runs.

`forward()` itself is torch's, because torch.compile identifies it by its file. It calls three methods of the replica
under torch's names; they are implemented here.
"""

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from paceline.progress import Phase, own_progress
from paceline.reducer.autograd import refuse_compiled_autograd, tensors_in
from paceline.replica import membership
from paceline.trace import Moment

if TYPE_CHECKING:
    from paceline.replica.ddp import DistributedDataParallel


def before_module(replica: "DistributedDataParallel", *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
    """A forward begins. Returns the inputs, moved to where the module needs them."""
    if replica._use_python_reducer:
        return inputs, kwargs
    if not replica._lazy_init_ran:
        replica._lazy_init()
    if replica._group_is_gone:
        membership.rejoin(replica)
    if torch.is_grad_enabled():
        _before_training(replica)
    core = replica._core
    core.before_forward(grads=torch.is_grad_enabled(), training=replica.training)
    core.trace.stamp(Moment.FORWARD_BEGIN, core.reductions_begun)
    own_progress().note(Phase.FORWARD if replica.training and torch.is_grad_enabled() else Phase.EVALUATE)
    if replica._capsules is not None and not core.batch.has_lanes:
        replica._capsules.note_forward(inputs, kwargs)
    if replica._join_config.enable or core.divisor != core.batch.count:
        replica._count_active_ranks()
    if replica._check_sync_bufs_pre_fwd():
        replica._sync_buffers()
    core.sync_in_join = None
    if replica._join_config.enable:
        core.sync_in_join = replica.require_backward_grad_sync
        replica._check_global_requires_backward_grad_sync(is_joined_rank=False)
    if replica._prepare_parameters is not None:
        replica._prepare_parameters()
    if replica.device_ids or replica.mixed_precision is not None:
        inputs, kwargs = replica._place_inputs(inputs, kwargs)
    return inputs, kwargs


def _before_training(replica: "DistributedDataParallel") -> None:
    refuse_compiled_autograd()
    if replica._joins_later and replica.training:  # a rank may evaluate a copy alone
        membership.join_later(replica)
    if replica._managed.module is not replica.module:
        replica._managed = replica._managed.of(replica.module, replica.parameters_to_ignore, replica._owned)
    if replica._core.sync_on:
        if replica.logger.iteration == replica.logger.sample_at:
            replica.logger.sample(replica._core.trace)
        replica.logger.iteration += 1


def run_module(replica: "DistributedDataParallel", *inputs: Any, **kwargs: Any) -> Any:
    """Run the module itself."""
    try:
        # torch's method makes torch.compile split graphs at buckets: used if it exists, and without units.
        splits = replica._use_python_reducer or not (replica._placement.shards_parameters or replica._core.is_alone())
        if "torch._dynamo" in sys.modules and splits:
            return TorchDDP._run_ddp_forward(replica, *inputs, **kwargs)
        return replica.module(*inputs, **kwargs)
    except BaseException as error:
        if replica._narrow is not None:
            replica._narrow.widen()
        if replica._capsules is not None and isinstance(error, Exception):
            replica._capsules.on_crash(error)
        raise


def after_module(replica: "DistributedDataParallel", output: Any) -> Any:
    """The module has run."""
    if replica._use_python_reducer:
        return output
    if replica._check_sync_bufs_post_fwd():
        replica._sync_buffers()
    core = replica._core
    grad_enabled = torch.is_grad_enabled()
    replica.require_forward_param_sync = grad_enabled and core.sync_on
    if grad_enabled:
        watched = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        for tensor in watched:
            core.hooks.watch_output(tensor)
        if not watched:
            core.hooks.register()  # there is no output whose backward could be watched
    elif replica._narrow is not None:
        replica._narrow.widen()
    core.trace.stamp(Moment.FORWARD_END, core.reductions_begun)
    return output
