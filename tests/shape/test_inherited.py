"""Our class is a subclass of torch's, so that isinstance() holds; none of torch's code may run by accident."""

import inspect
from typing import Any

import pytest
from torch import nn

import paceline
from paceline.replica.torch_surface import TorchSurface

OURS = paceline.DistributedDataParallel
TORCHS: Any = nn.parallel.DistributedDataParallel

# What runs as torch wrote it, and why it may.
USED_AS_THEY_ARE = {
    # torch.compile knows it by its file. It calls _pre_forward, _run_ddp_forward and _post_forward, which are ours.
    "forward": "runs the module between two parts of ours",
    # They touch nothing of torch's reducer.
    "_assign_modules_buffers": "collects the buffers of the module",
    "_check_comm_hook": "checks the signature of a hook, with torch's messages",
    "_check_default_group": "refuses to pickle when there is no default group",
    "_get_data_parallel_params": "static: lists parameters for other libraries",
    "_set_params_and_buffers_to_ignore_for_model": "static: marks a module before it is wrapped",
    "_get_parameters": "lists parameters",
    "_get_active_ddp_module": "tells torch.compile which replica it is in",
    "_inside_ddp_forward": "says so, for the time of a forward",
    "_log_and_throw": "raises, and tells the logger, which is ours",
    "_passing_sync_batchnorm_handle": "refuses SyncBatchNorm on CPU",
    "_set_ddp_sink_clone": "sets a flag that means nothing here",
    "scatter": "kept by torch for old callers",
    "to_kwargs": "kept by torch for old callers",
    "gather": "kept by torch for old callers",
    "join_device": "the device, for torch's Join",
    "join_process_group": "the group, for torch's Join",
    "_distributed_rank": "the rank within the group",
    # When buffers are made equal; the broadcast itself is ours (_distributed_broadcast_coalesced).
    "_check_and_sync_module_buffers": "buffers of a rank that has joined",
    "_check_sync_bufs_pre_fwd": "whether to do it before forward",
    "_check_sync_bufs_post_fwd": "whether to do it after forward",
    "will_sync_module_buffers": "whether to do it at all",
    "_sync_buffers": "chooses the rank to follow",
    "_sync_module_buffers": "a buffer hook, or the broadcast",
    "_default_broadcast_coalesced": "calls the broadcast, which is ours",
    "_register_buffer_comm_hook": "stores a buffer hook",
    # Optimizers that run inside backward: torch's hooks on parameters, our reducer tells when.
    "_setup_in_backward_optimizers": "moves them behind the reduction of a bucket",
    "_register_fused_optim": "registers a functional optimizer as a communication hook",
    # torch.compile with optimize_ddp="python_reducer": torch's functional hooks instead of our reducer.
    "_register_accum_grad_hook": "called on purpose by _build_for_compiled_autograd",
}
# What torch's class calls only from methods that we override, so it never runs.
NEVER_RUN = {
    "_ddp_init_helper": "torch's constructor builds its C++ reducer with it",
    "_build_params_for_reducer": "for the C++ reducer",
    "_build_debug_param_to_name_mapping": "for the C++ reducer",
    "_register_delay_all_reduce_hook": "torch's constructor; delayed parameters are ordered by our layout",
    "_delayed_all_reduce_hook": "belongs to the one above",
    "_clear_grad_buffer": "belongs to delayed parameters; called from torch's _pre_forward",
    "_fire_reducer_autograd_hook": "mixed precision of the C++ reducer",
    "_root_copy_hook": "mixed precision of the C++ reducer",
    "_module_wait_for_copy_hook": "mixed precision of the C++ reducer",
    "_match_all_reduce_for_bwd_pass": "torch's join hook; ours shadows a reduction",
    "_match_unused_params_allreduce": "torch's join hook",
}
# Arguments that torch has since 2.15. Other versions do not have them, so they go by name alone.
NEWER = {"lazy_bucket_allocation"}


def functions_of(cls: Any) -> set[str]:
    kinds = (classmethod, staticmethod, property)
    return {name for name, value in vars(cls).items() if inspect.isfunction(value) or isinstance(value, kinds)}


def overridden() -> set[str]:
    ours = OURS.__mro__[: OURS.__mro__.index(TORCHS)]
    return {name for cls in ours for name in vars(cls)}


def test_every_method_of_torchs_class_is_ours_or_allowed() -> None:
    inherited = functions_of(TORCHS) - overridden()
    assert inherited == USED_AS_THEY_ARE.keys() | NEVER_RUN.keys()


def test_the_lists_are_disjoint_and_up_to_date() -> None:
    assert not USED_AS_THEY_ARE.keys() & NEVER_RUN.keys()
    assert not (USED_AS_THEY_ARE.keys() | NEVER_RUN.keys()) & overridden()


@pytest.mark.parametrize("name", NEVER_RUN)
def test_what_never_runs_is_called_by_nobody_who_does(name: str) -> None:
    live = [value for cls in (OURS, TorchSurface) for value in vars(cls).values()]
    live += [inspect.getattr_static(TORCHS, other) for other in USED_AS_THEY_ARE]
    for value in live:
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if inspect.isfunction(function):
            called = inspect.unwrap(function).__code__.co_names
            assert name not in called, f"{function.__qualname__} calls {name}"


def test_the_constructor_takes_torchs_arguments_in_torchs_order_with_torchs_defaults() -> None:
    torchs = [p for p in inspect.signature(TORCHS.__init__).parameters.values() if p.name not in NEWER]
    ours = list(inspect.signature(OURS.__init__).parameters.values())
    assert {p.name for p in ours} >= NEWER
    assert [(p.name, p.default, p.kind) for p in ours[: len(torchs)]] == [(p.name, p.default, p.kind) for p in torchs]
    assert {p.kind for p in ours[len(torchs) :]} == {inspect.Parameter.KEYWORD_ONLY}, "what is ours goes by name"


@pytest.mark.parametrize("name", sorted(name for name in functions_of(TORCHS) if not name.startswith("_")))
def test_public_methods_take_torchs_arguments(name: str) -> None:
    theirs, ours = (inspect.getattr_static(cls, name) for cls in (TORCHS, OURS))
    if isinstance(theirs, property):
        assert isinstance(ours, property)
        return
    for parameter, expected in zip(
        inspect.signature(ours).parameters.values(), inspect.signature(theirs).parameters.values(), strict=True
    ):
        assert (parameter.name, parameter.default, parameter.kind) == (expected.name, expected.default, expected.kind)
