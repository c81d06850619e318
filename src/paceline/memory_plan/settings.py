"""What `paceline plan` can be told. Needs no torch."""

from dataclasses import dataclass

from paceline.memory_plan.closed_form import DEVICES, plan_params
from paceline.memory_plan.numbers import parse_bytes, parse_count, parse_list
from paceline.memory_plan.states import OPTIMIZERS, PRECISIONS, PlanError
from paceline.memory_plan.value import MemoryPlan
from paceline.option import option

UPDATES: dict[str, dict[str, bool | None]] = {
    "auto": {"foreach": None, "fused": None},
    "foreach": {"foreach": True, "fused": None},
    "fused": {"foreach": None, "fused": True},
    "loop": {"foreach": False, "fused": False},
}


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
    layers: int | None = option(None, "blocks; guessed from the parameters where it is not given")
    width: int | None = option(None, "width of the residual stream; guessed where it is not given")
    heads: int | None = option(None, "heads of attention; guessed where it is not given")
    untied: bool = option(False, "the head has a matrix of its own")
    checkpointing: bool = option(False, "blocks are recomputed in backward instead of kept")
    accumulate: int = option(1, "micros of one step")
    lanes: int | None = option(None, "lanes of a global batch, for the same bits on any number of ranks")
    update: str = option("auto", f"how the optimizer updates: {', '.join(UPDATES)}")
    device: str = option("cuda", f"one of {', '.join(DEVICES)}")
    device_memory: str | None = option(
        None, "memory of one device, such as 24GiB: whether it fits, and the largest batch"
    )
    link_gbit: float | None = option(None, "speed of a rank's link in Gbit/s")
    tflops: float | None = option(None, "what a rank really computes per second")

    def plan(self) -> MemoryPlan:
        """The answer."""
        if self.update not in UPDATES:
            raise PlanError(f"update={self.update!r}: expected one of {', '.join(UPDATES)}")
        return plan_params(
            parse_count("params", self.params),
            self.batch,
            self.seq,
            self.vocab,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            tied=not self.untied,
            checkpointing=self.checkpointing,
            optimizer=self.optimizer,
            dtype=self.dtype,
            ranks=parse_list("ranks", self.ranks),
            accumulate=self.accumulate,
            lanes=self.lanes,
            device=self.device,
            device_bytes=None if self.device_memory is None else parse_bytes("device_memory", self.device_memory),
            link_gbit=self.link_gbit,
            tflops=self.tflops,
            **UPDATES[self.update],
        )
