"""What one parameter costs: conventions of dtype and optimizer, as sums that can be checked. Needs no torch."""

from dataclasses import dataclass

from paceline.errors import UsageError


class PlanError(UsageError):
    """Something that cannot be planned; the message names the setting and what it accepts."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of one element in each place, and the convention in words."""

    parameter: int
    gradient: int
    master: int  # 0: the parameters are their own master copy
    state: int
    activation: int  # what matrix products read and write
    residual: int  # what additions and norms keep
    autocast: bool
    words: str


@dataclass(frozen=True, slots=True)
class OptimizerCost:
    """What an optimizer keeps per parameter, and what its step needs for a moment."""

    states: tuple[str, ...]
    foreach_copies: int  # temporaries as large as a whole group of parameters
    loop_copies: int  # temporaries as large as one parameter, when parameters are updated one by one
    can_fuse: bool


PRECISIONS = {
    "float32": Precision(4, 4, 0, 4, 4, 4, False, "everything in float32"),
    "bf16": Precision(
        4, 4, 0, 4, 2, 4, True, "autocast: float32 parameters are the master copy, matrix products run in bfloat16"
    ),
    "bf16-master": Precision(
        2, 2, 4, 4, 2, 2, False, "bfloat16 parameters and gradients, a float32 master copy and float32 optimizer states"
    ),
    "bf16-pure": Precision(2, 2, 0, 2, 2, 2, False, "parameters, gradients and optimizer states all in bfloat16"),
}
OPTIMIZERS = {
    "adamw": OptimizerCost(("m", "v"), 1, 2, True),
    "adam": OptimizerCost(("m", "v"), 1, 2, True),
    "sgd": OptimizerCost((), 0, 0, True),
    "sgd-momentum": OptimizerCost(("momentum",), 0, 0, True),
    "adagrad": OptimizerCost(("sum",), 2, 1, True),
    "rmsprop": OptimizerCost(("v",), 1, 1, False),
}


def precision_of(dtype: str) -> Precision:
    return PRECISIONS[_known("dtype", dtype, PRECISIONS)]


def optimizer_of(name: str) -> OptimizerCost:
    return OPTIMIZERS[_known("optimizer", name, OPTIMIZERS)]


def _known(
    field: str, value: str, accepted: dict[str, object] | dict[str, Precision] | dict[str, OptimizerCost]
) -> str:
    if value not in accepted:
        raise PlanError(f"{field}={value!r}: expected one of {', '.join(accepted)}")
    return value


def parts_per_parameter(dtype: str, optimizer: str) -> list[tuple[str, int]]:
    """Names and bytes of what every trained parameter costs for as long as the run lasts."""
    precision = precision_of(dtype)
    parts = [("parameters", precision.parameter), ("gradients", precision.gradient)]
    if precision.master:
        parts.append(("master", precision.master))
    return parts + [(state, precision.state) for state in optimizer_of(optimizer).states]


def convention(dtype: str, optimizer: str) -> str:
    """`parameters 4 + gradients 4 + m 4 + v 4 = 16 bytes per parameter`, and what that means in words."""
    parts = parts_per_parameter(dtype, optimizer)
    total = sum(size for _, size in parts)
    summed = " + ".join(f"{name} {size}" for name, size in parts)
    return f"{summed} = {total} bytes per parameter ({dtype}: {precision_of(dtype).words})"


def update_way(optimizer: str, device: str, foreach: bool | None, fused: bool | None) -> str:
    """`fused`, `foreach` or `loop`: how the step updates parameters. torch's own rule where nothing is said."""
    cost = optimizer_of(optimizer)
    if foreach and fused:
        raise PlanError("foreach=True and fused=True: expected one of them at most")
    if fused and not cost.can_fuse:
        raise PlanError(f"fused=True: {optimizer} has no fused step; expected foreach=True, or neither")
    if fused:
        return "fused"
    by_itself = device == "cuda" and fused is None
    return "foreach" if foreach or (foreach is None and by_itself) else "loop"
