"""What `paceline plan` can be told. Needs no torch."""

from dataclasses import dataclass, field
from typing import Any

from paceline.memory_plan.closed_form import DEVICES, plan_params
from paceline.memory_plan.numbers import parse_bytes, parse_count, parse_list
from paceline.memory_plan.states import OPTIMIZERS, PRECISIONS, PlanError
from paceline.memory_plan.value import MemoryPlan

UPDATES: dict[str, dict[str, bool | None]] = {
    "auto": {"foreach": None, "fused": None},
    "foreach": {"foreach": True, "fused": None},
    "fused": {"foreach": None, "fused": True},
    "loop": {"foreach": False, "fused": False},
}


def option(default: Any, about: str) -> Any:
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """One question about a transformer. The order here is the order of `--help`."""

    params: str = option("124M", "number of parameters: 124M, 1.3B, …")
    batch: int = option(8, "samples of one micro of one rank")
    seq: int = option(1024, "tokens of one sample")
    vocab: int = option(50304, "size of the vocabulary")
    dtype: str = option("bf16", f"one of {', '.join(PRECISIONS)}; bf16 is autocast")
    optimizer: str = option("adamw", f"one of {', '.join(OPTIMIZERS)}")
    ranks: str = option("1,2,4,8", "sizes of the world, comma-separated")
    layers: int = option(0, "blocks; 0: guessed from the parameters")
    width: int = option(0, "width of the residual stream; 0: guessed")
    heads: int = option(0, "heads of attention; 0: guessed")
    untied: bool = option(False, "the head has a matrix of its own")
    checkpointing: bool = option(False, "blocks are recomputed in backward instead of kept")
    accumulate: int = option(1, "micros of one step")
    update: str = option("auto", f"how the optimizer updates: {', '.join(UPDATES)}")
    device: str = option("cuda", f"one of {', '.join(DEVICES)}")
    device_memory: str = option("", "memory of one device, such as 24GiB: whether it fits, and the largest batch")
    link_gbit: float = option(0.0, "speed of a rank's link in Gbit/s; 0: unknown")
    tflops: float = option(0.0, "what a rank really computes per second; 0: unknown")

    def plan(self) -> MemoryPlan:
        """The answer."""
        if self.update not in UPDATES:
            raise PlanError(f"update={self.update!r}: expected one of {', '.join(UPDATES)}")
        return plan_params(
            parse_count("params", self.params),
            self.batch,
            self.seq,
            self.vocab,
            layers=_given(self.layers),
            width=_given(self.width),
            heads=_given(self.heads),
            tied=not self.untied,
            checkpointing=self.checkpointing,
            optimizer=self.optimizer,
            dtype=self.dtype,
            ranks=parse_list("ranks", self.ranks),
            accumulate=self.accumulate,
            device=self.device,
            device_bytes=parse_bytes("device_memory", self.device_memory) if self.device_memory else None,
            link_gbit=_given(self.link_gbit),
            tflops=_given(self.tflops),
            **UPDATES[self.update],
        )


def _given(value: Any) -> Any:
    return value or None
