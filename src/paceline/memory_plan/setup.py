"""How a model is trained, as far as memory and traffic depend on it, and what a parameter costs. Needs no torch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.blocks import aligned_blocks, lanes_of
from paceline.memory_plan.numbers import PlanError, parse_bytes, parse_count, parse_list, parse_positive

DEVICES = ("cpu", "cuda")
WIRE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of an element, by the type in which gradients are summed
UPDATES = ("auto", "foreach", "fused", "loop")
TRANSPORTS = ("auto", "torch", "shm", "two-level")
PLACEMENTS = ("ddp", "zero1", "zero2", "zero3")  # each shards one thing more: optimizer state, gradients, parameters


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


def bytes_per_parameter(dtype: str, optimizer: str) -> dict[str, int]:
    """What every trained parameter costs on one rank for as long as the run lasts, by name."""
    precision = PRECISIONS[dtype]
    master = {"master": precision.master} if precision.master else {}
    states = dict.fromkeys(OPTIMIZERS[optimizer].states, precision.state)
    return {"parameters": precision.parameter, "gradients": precision.gradient, **master, **states}


Check = Callable[[str, Any], Any]


def setting(default: Any, about: str, check: Check, *, group: str, text: bool = False) -> Any:
    """A field that is checked when it is set. Help lists it under `group`; `text`: it may have a unit, as 24GiB has."""

    def checked(name: str, value: Any) -> Any:
        return None if value is None and default is None else check(name, value)

    return field(default=default, metadata={"about": about, "check": checked, "group": group, "text": text})


def one_of(accepted: Iterable[str]) -> Check:
    def check(name: str, value: Any) -> str:
        if value not in accepted:
            raise PlanError(f"{name}={value!r}: expected one of {', '.join(accepted)}")
        return str(value)

    return check


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """Everything beside the model. Numbers may be given as people write them: ranks="1,2,4", device_memory="24GiB"."""

    dtype: str = setting(
        "bf16", f"one of {', '.join(PRECISIONS)}; bf16 is autocast", one_of(PRECISIONS), group="Training"
    )
    optimizer: str = setting("adamw", f"one of {', '.join(OPTIMIZERS)}", one_of(OPTIMIZERS), group="Training")
    ranks: tuple[int, ...] = setting("1,2,4,8", "world sizes, comma-separated", parse_list, group="Training", text=True)
    accumulate: int = setting(1, "microbatches of one step", parse_count, group="Training")
    lanes: int | None = setting(
        None, "lanes of a global batch, for the same bits on any number of ranks", parse_count, group="Training"
    )
    placement: str = setting(
        "ddp",
        f"one of {', '.join(PLACEMENTS)}: what is sharded across ranks",
        one_of(PLACEMENTS),
        group="Training",
    )
    shard: int | None = setting(
        None,
        "how many consecutive ranks share one set of shards, with replicas on the next (default: all ranks)",
        parse_count,
        group="Training",
    )
    copies: int | None = setting(
        None,
        "how many ranks hold each shard, whatever the number of ranks: the same in another way",
        parse_count,
        group="Training",
    )
    meta: bool = setting(
        False,
        "the model starts on the meta device: under zero3 no rank ever holds the whole",
        lambda _, value: bool(value),
        group="Training",
    )
    master: str | None = setting(
        None, "float32: master weights, for parameters in bfloat16", one_of(("float32",)), group="Training"
    )
    reduce_dtype: str | None = setting(
        None,
        f"one of {', '.join(WIRE_BYTES)}: type in which gradients are summed (default: their own)",
        one_of(WIRE_BYTES),
        group="Training",
    )
    update: str = setting("auto", f"how the optimizer updates: {', '.join(UPDATES)}", one_of(UPDATES), group="Training")
    device: str = setting("cuda", f"one of {', '.join(DEVICES)}", one_of(DEVICES), group="Machine")
    transport: str = setting(
        "auto",
        f"one of {', '.join(TRANSPORTS)}: how ranks exchange bytes; auto is shared memory (shm) on the CPU, else torch",
        one_of(TRANSPORTS),
        group="Machine",
    )
    device_memory: int | None = setting(
        None,
        "memory of one device, such as 24GiB: says whether the model fits, and the largest batch that does",
        parse_bytes,
        group="Machine",
        text=True,
    )
    link_gbit: float | None = setting(None, "speed of a rank's link in Gbit/s", parse_positive, group="Machine")
    backward_s: float | None = setting(
        None, "seconds that one backward takes on a rank", parse_positive, group="Machine"
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, item.metadata["check"](item.name, getattr(self, item.name)))
        if self.update == "fused" and not self.optimizer_cost.can_fuse:
            raise PlanError(f"update='fused': {self.optimizer} has no fused step; expected foreach, loop or auto")
        if self.lanes is not None and self.lanes < max(self.ranks):
            raise PlanError(f"lanes={self.lanes}: expected at least one for each of {max(self.ranks)} ranks")
        if self.shard is not None and self.copies is not None:
            raise PlanError(
                f"shard={self.shard} and copies={self.copies} say the same in two ways: expected one of them at most"
            )
        name, value = ("shard", self.shard) if self.copies is None else ("copies", self.copies)
        if value not in (None, 1) and self.placement == "ddp":
            raise PlanError(f"{name}={value}: placement='ddp' makes no shards; expected zero1, zero2 or zero3")
        if torn := [ranks for ranks in self.ranks if not self.cuts_evenly(ranks)]:
            raise PlanError(f"{name}={value}: expected a divisor of the number of ranks, {torn[0]}")
        if self.device == "cuda" and self.transport in ("shm", "two-level"):
            raise PlanError(f"transport={self.transport!r}: device='cuda' shares no memory; expected auto or torch")
        if uneven := [ranks for ranks in self.ranks if not self.deals_evenly(ranks)]:
            raise PlanError(
                f"lanes={self.lanes} with placement='zero3': expected a multiple of {uneven[0]} ranks, which gather "
                f"the same parameters at the same time; or use placement='zero2'"
            )

    def deals_evenly(self, ranks: int) -> bool:
        """Whether each of so many ranks runs as many lanes as all others, where that is needed."""
        return self.lanes is None or self.placement != "zero3" or self.lanes % ranks == 0

    def shards(self, what: str, ranks: int) -> bool:
        """Whether each of so many ranks keeps its shards only of optimizer "states", "gradients" or "parameters"."""
        if what == "gradients" and self.lanes is not None:
            return False  # the sums of earlier lanes need memory for all of them anyway
        return self.parts(ranks) > 1 and PLACEMENTS.index(self.placement) > ("states", "gradients", "parameters").index(
            what
        )

    def parts(self, ranks: int) -> int:
        """Over how many of so many ranks shards are made. The others hold the same shards."""
        if self.copies is not None:
            return max(1, ranks // self.copies)
        return ranks if self.shard is None else min(self.shard, ranks)

    def cuts_evenly(self, ranks: int) -> bool:
        """Whether every shard is held by as many of so many ranks. In a smaller world all ranks do the same."""
        multiple = self.shard or self.copies or 1
        return ranks < multiple or ranks % multiple == 0

    @property
    def shares_memory(self) -> bool:
        """Whether ranks read in each other's memory. Else what is exchanged needs memory to be sent from and received
        in."""
        return self.device == "cpu" and self.transport in ("auto", "shm")

    @property
    def kind(self) -> str:
        """The precision that is meant, by its name in `PRECISIONS`."""
        return "bf16-master" if self.master is not None and self.dtype == "bf16-pure" else self.dtype

    @property
    def precision(self) -> Precision:
        return PRECISIONS[self.kind]

    @property
    def wire_bytes(self) -> int:
        """Of one element of a gradient, where it is summed."""
        return self.precision.gradient if self.reduce_dtype is None else WIRE_BYTES[self.reduce_dtype]

    @property
    def optimizer_cost(self) -> OptimizerCost:
        return OPTIMIZERS[self.optimizer]

    @property
    def update_kind(self) -> str:
        """`fused`, `foreach` or `loop`: how the step updates parameters; by default, as torch does."""
        return self.update if self.update != "auto" else "foreach" if self.device == "cuda" else "loop"

    @property
    def convention(self) -> str:
        """`parameters 4 + gradients 4 + (m 4 + v 4) / N = 8 + 8 / N bytes per parameter`, and what that means."""
        parts = bytes_per_parameter(self.kind, self.optimizer)
        kinds = {name: name if name in ("parameters", "gradients") else "states" for name in parts}
        cut = {name: size for name, size in parts.items() if self.shards(kinds[name], max(2, *self.ranks))}
        over = "N" if self.copies in (None, 1) else f"(N / {self.copies})"
        over = over if self.shard is None else str(self.shard)
        kept = {name: size for name, size in parts.items() if name not in cut}
        terms, sums = [f"{name} {size}" for name, size in kept.items()], [str(sum(kept.values()))] if kept else []
        if cut:
            terms.append(f"({' + '.join(f'{name} {size}' for name, size in cut.items())}) / {over}")
            sums.append(f"{sum(cut.values())} / {over}")
        summed = f"{' + '.join(terms)} = {' + '.join(sums)} bytes per parameter"
        return f"{summed} ({self.kind}: {self.precision.words})"

    def lane_copies(self, ranks: int) -> int:
        """How many sums of earlier lanes a rank holds at most: one for each block of those that it has run."""
        if self.lanes is None:
            return 0
        worlds = (lanes_of(rank, ranks, self.lanes) for rank in range(ranks))
        return max(len(list(aligned_blocks(own.start, run))) for own in worlds for run in range(len(own)))
