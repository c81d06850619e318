"""Checks of the constructor's arguments, before anything is started."""

import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import UnreducedGradients, UsageError
from paceline.member import in_elastic_job
from paceline.placement import Placement

CHOICES = {"init": ("broadcast", "verify"), "unused": ("zero", "error"), "bucket_plan": ("auto", "fixed")}
# Names of settings in FSDP and DeepSpeed, and their equivalents here.
_NO_OFFLOAD = (
    'nothing is kept in host memory for a device; placement="zero3" divides parameters, gradients and optimizer state '
    "by the number of ranks, and `paceline plan` says on how many a model fits"
)
ELSEWHERE = {
    "cpu_offload": _NO_OFFLOAD,
    "offload_policy": _NO_OFFLOAD,
    "offload_optimizer": _NO_OFFLOAD,
    "offload_param": _NO_OFFLOAD,
    "mp_policy": 'convert the module, as by module.bfloat16(), and pass master="float32" to model.optimizer()',
    "sharding_strategy": 'pass placement="zero1", "zero2" or "zero3", with shard= for shards over some of the ranks',
    "reshard_after_forward": 'pass placement="zero3" to free parameters after forward, or "zero2" to keep them',
    "auto_wrap_policy": "pass units= with the modules, or their classes, that are gathered together",
}
TRANSPORTS = ("auto", "torch", "shm", "two-level", "local")


@dataclass(frozen=True, slots=True)
class Managed:
    """The parameters that a replica keeps equal, in registration order."""

    module: nn.Module  # whose parameters they are
    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    sparse: tuple[bool, ...]

    def of(self, module: nn.Module, ignored: set[str], owned: Any) -> "Managed":
        """The same parameters, of a module that has replaced the other one, such as a compiled one around it. If
        they are in shards, `owned` knows what the module holds instead."""
        mine = {id(param) for param in self.params}
        strangers = [
            name
            for name, param in module.named_parameters()
            if param.requires_grad
            and id(param) not in mine
            and (owned is None or owned.find(param) is None)
            and name not in ignored
        ]
        if strangers:
            raise UnreducedGradients(
                f"the wrapped module was replaced by another {type(module).__name__}, so the gradients of "
                f"{strangers[0]}"
                + (f" and {len(strangers) - 1} more parameters" if len(strangers) > 1 else "")
                + " are not reduced; wrap the other module in a DistributedDataParallel of its own"
            )
        return replace(self, module=module)


def check_choices(**given: str) -> None:
    """Refuse unknown names."""
    for name, value in given.items():
        if value not in CHOICES[name]:
            raise UsageError(f"{name}={value!r} is not known; accepted: {', '.join(map(repr, CHOICES[name]))}")


def check_objects(*, timeout: float | None, transport: Any, reduction: Any) -> None:
    """Refuse arguments of the wrong type."""
    if isinstance(transport, str) and transport not in TRANSPORTS:
        accepted_names = ", ".join(map(repr, TRANSPORTS))
        raise UsageError(f"transport={transport!r} is not known; accepted: {accepted_names}, or a Transport object")
    if not isinstance(transport, str) and not callable(getattr(transport, "all_reduce", None)):
        raise UsageError(f"transport={transport!r} is not a Transport; expected a name, or an object with its methods")
    if reduction is not None and not (callable(reduction) and hasattr(reduction, "divides")):
        raise UsageError(
            f"reduction={reduction!r} is not a Reduction; expected one such as "
            f"paceline.strategies.cast.Wire(torch.bfloat16), or None for the mean"
        )
    if timeout is not None and not (isinstance(timeout, (int, float)) and math.isfinite(timeout) and timeout > 0):
        raise UsageError(f"timeout={timeout!r} is not a time; expected seconds above zero, or None")


def check_together(mixed_precision: Any, reduction: Any, delayed: Any, hooked: Any) -> None:
    """Refuse arguments that contradict each other."""
    if mixed_precision is not None and reduction is not None:
        raise UsageError("mixed_precision says in which dtype gradients are reduced; pass no reduction= beside it")
    if (delayed is None) != (hooked is None):
        raise UsageError("delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.")


def check_reduce_dtype(reduce_dtype: Any, mixed_precision: Any, reduction: Any, lanes: Any) -> torch.dtype | None:
    """The type in which gradients are summed. The other arguments decide it themselves, if given."""
    if reduce_dtype is None:
        return None
    found = floating_type("reduce_dtype", reduce_dtype)
    beside = {"mixed_precision": mixed_precision, "reduction": reduction, "lanes": lanes}
    for name in (name for name, given in beside.items() if given is not None):
        raise UsageError(
            f"reduce_dtype={reduce_dtype!r} cannot be combined with {name}=, which decides in which type gradients are "
            f"summed; leave one of them out"
        )
    return found


def floating_type(name: str, given: object) -> torch.dtype:
    """The dtype that `given` is or names: torch.float32, or "float32"."""
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(
            f'{name}={given!r} is not a floating point type; expected one such as torch.float32, or "float32"'
        )
    return found


def or_from_environment(transport: Any, lanes: Any) -> tuple[Any, Any]:
    """Defaults from the environment, which a notebook sets for all of its cells."""
    if transport == "auto":
        transport = os.environ.get("PACELINE_TRANSPORT") or "auto"
    if lanes is None and (told := os.environ.get("PACELINE_LANES")):
        if not (told.isascii() and told.isdigit() and len(told) < 10):
            raise UsageError(f"PACELINE_LANES={told!r} is not a number of lanes; expected a whole number of at least 1")
        lanes = int(told)
    return transport, lanes


def check_lanes(lanes: Any, seed: Any, size: int, module: nn.Module, **beside: bool) -> None:
    """Refuse impossible lanes, and those that would not give the same bits in every world. `beside` names other
    arguments that cannot be combined with lanes."""
    if not isinstance(seed, int):
        raise UsageError(f"seed={seed!r} is not a whole number")
    if lanes is None:
        return
    if not isinstance(lanes, int) or isinstance(lanes, bool) or lanes < 1:
        raise UsageError(f"lanes={lanes!r} is not a number of lanes; expected a whole number of at least 1, or None")
    if lanes < size:
        raise UsageError(
            f"lanes={lanes} is smaller than the world of {size} ranks, so some would have nothing to do; expected at "
            f"least {size} lanes, or start fewer ranks"
        )
    for name in (name for name, given in beside.items() if given):
        raise UsageError(f"lanes={lanes} cannot be combined with {name}: its sums depend on the number of ranks")
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm):
            raise UsageError(
                f"lanes={lanes} cannot be combined with the SyncBatchNorm {name or 'that was given'}: its statistics "
                f"depend on the number of ranks; use BatchNorm, whose statistics are then the mean over "
                f"lanes"
            )
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
            raise UsageError(
                f"lanes={lanes} need dense gradients, but {name or 'the module'} makes sparse ones; set sparse=False"
            )


def describe_reduction(reduction: Any) -> str:
    """A text that is equal on two ranks if their reductions are: the type, and the fields that are comparable."""
    told = [
        f"{item.name}={getattr(reduction, item.name)!r}"
        for item in (fields(reduction) if is_dataclass(reduction) else ())
        if isinstance(getattr(reduction, item.name), (bool, int, float, str, torch.dtype))
    ]
    return f"{type(reduction).__name__}({', '.join(told)})"


def check_module(module: Any, placement: Placement, device_mesh: Any) -> None:
    """Refuse anything but a bare module, and unsupported contents."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module to wrap, got {type(module).__name__}")
    for name, child in module.named_modules():
        if isinstance(child, nn.parallel.DistributedDataParallel):
            where = f"its submodule {name!r}" if name else "it"
            raise UsageError(
                f"cannot wrap {type(module).__name__}: {where} is already a DistributedDataParallel, so gradients "
                f"would be reduced twice; wrap the bare module once"
            )
    _check_parameters(module, placement, device_mesh)


def refuse_elsewhere_known(given: Iterable[str]) -> None:
    """Refuse settings of other libraries by name, and say what to use instead."""
    for name in given:
        if name in ELSEWHERE:
            raise TypeError(f"DistributedDataParallel takes no {name}=: {ELSEWHERE[name]}")


def _check_parameters(module: nn.Module, placement: Placement, device_mesh: Any) -> None:
    """Refuse parameters whose storage does not allow reducing gradients or making shards."""
    sliced = getattr(device_mesh, "ndim", 0) == 1 and is_sliced(device_mesh)
    shards = placement.shards_optimizer
    if shards and sliced:
        raise UsageError(
            f"device_mesh= is a slice of a larger mesh, as for tensor parallelism, which cannot be combined with "
            f'placement="{placement.name}"; use placement="ddp", or pass process_group=device_mesh.get_group() if the '
            f"ranks of the slice have whole parameters"
        )
    dtensor: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, param in module.named_parameters():
        if name in ignored:
            continue
        if isinstance(param, dtensor) and not sliced:
            raise UsageError(
                f"{name} is a DTensor, of which this rank has a part (tensor parallelism), expected a whole parameter; "
                f'use placement="ddp" with the mesh of its replicas, such as device_mesh=mesh["dp"], or wrap the '
                f"module without making it parallel"
            )
        if shards and hasattr(type(param), "__tensor_flatten__"):
            raise UsageError(
                f"{name} is a {type(param).__name__}, which stores its values in other tensors, so "
                f'placement="{placement.name}" cannot shard it; expected an ordinary parameter; use placement="ddp"'
            )
        if param.requires_grad and param.dtype.is_floating_point and param.dtype.itemsize == 1:
            raise UsageError(
                f"{name} is trained in {param.dtype}, in which gradients cannot be reduced; expected float32, bfloat16 "
                f"or float16; keep the parameter in one of these and convert it inside forward"
            )


def managed_parameters(module: nn.Module, ignored: set[str]) -> Managed:
    """The parameters that take part, each once, without those that are frozen or ignored."""
    sparse_params = {
        id(layer.weight)
        for layer in module.modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
    }
    found = [(n, p) for n, p in module.named_parameters() if n not in ignored]
    for name, param in found:
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                f"Modules with uninitialized parameters can't be used with `DistributedDataParallel`: {name} has no "
                f"shape yet. Run a dummy forward pass to correctly initialize the modules"
            )
    kept = [(n, p) for n, p in found if p.requires_grad]
    if not kept:
        what = "has no parameters" if not found else "has only frozen or ignored parameters"
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient: "
            f"{type(module).__name__} {what}; use the bare module"
        )
    device_types = {p.device.type for _, p in found}
    if len(device_types) != 1:
        examples = {p.device.type: n for n, p in reversed(found)}
        listed = ", ".join(f"{n} on {kind}" for kind, n in sorted(examples.items()))
        raise UsageError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module parameters "
            f"locate in {device_types} ({listed}); move the whole module with module.to(device)"
        )
    return Managed(
        module=module,
        names=tuple(n for n, _ in kept),
        params=tuple(p for _, p in kept),
        sparse=tuple(id(p) in sparse_params for _, p in kept),
    )


def choose_group(process_group: Any, device_mesh: Any) -> Any:
    """The process group to work in: the given one, that of a 1-D mesh, or the default."""
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(
                f"Only 1D device mesh is supported, but got {device_mesh}. Pass the dimension over which the module is "
                f"replicated, such as mesh['dp']"
            )
        return device_mesh.get_group(mesh_dim=0)
    if process_group is not None:
        if process_group == dist.GroupMember.NON_GROUP_MEMBER:
            raise UsageError("this rank is not a member of the given process_group; build the model on members")
        if not isinstance(process_group, dist.ProcessGroup):
            raise UsageError(f"expected a process group, such as dist.new_group() returns, got {process_group!r}")
        return process_group
    if not dist.is_initialized() and in_elastic_job():
        raise UsageError(
            "an elastic job forms its group in paceline.Elastic(model=..., optimizer=..., ...), which this rank has "
            "not created yet: create it after the model and the optimizer, and before the model is used"
        )
    if not dist.is_initialized():
        raise UsageError(
            "Default process group has not been initialized: call paceline.init() (or "
            "torch.distributed.init_process_group) before wrapping the model"
        )
    return dist.distributed_c10d._get_default_group()


def is_sliced(device_mesh: Any) -> bool:
    """Whether the mesh is a part of a larger one."""
    if hasattr(device_mesh, "_get_root_mesh"):
        return bool(device_mesh._get_root_mesh() != device_mesh)
    resources: Any = vars(dist.device_mesh)["_mesh_resources"]  # of torch 2.9
    return bool(resources.get_root_mesh(device_mesh) != device_mesh)


def choose_devices(
    device_ids: Sequence[Any] | None, output_device: Any, params: Sequence[torch.Tensor]
) -> tuple[list[int] | None, int | None]:
    """`device_ids` and `output_device` in torch's meaning: None for CPU and multi-device modules."""
    devices = {p.device for p in params}
    if device_ids is not None and len(device_ids) > 1:
        raise UsageError(f"device_ids can only be None or contain a single element, got {list(device_ids)}.")
    if not device_ids or len(devices) > 1 or next(iter(devices)).type == "cpu":
        if device_ids or output_device:
            raise UsageError(
                "DistributedDataParallel device_ids and output_device arguments only work with single-device/"
                f"multiple-device GPU modules or CPU modules, but got device_ids {device_ids}, output_device "
                f"{output_device}, and module parameters {devices}."
            )
        return None, None
    first = torch._utils._get_device_index(device_ids[0], True)
    return [first], torch._utils._get_device_index(first if output_device is None else output_device, True)


def weight_of(weight: Any, params: Sequence[torch.Tensor]) -> float:
    """A number of tokens, or the like, as a float."""
    try:
        tokens = float(weight)
    except (TypeError, ValueError):
        tokens = math.nan
    if isinstance(weight, str) or not 0 <= tokens < math.inf:
        raise UsageError(f"expected a weight of zero or more, such as a number of tokens, got {weight!r}")
    if any(p.dtype == torch.float16 for p in params):
        raise UsageError("weight() would overflow gradients in float16; keep the parameters in float32 or bfloat16")
    return tokens
