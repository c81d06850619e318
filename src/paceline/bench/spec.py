"""What is trained: models by name, and the settings that measurements of training share."""

from dataclasses import dataclass, fields
from typing import Any

from paceline.bench.contenders import CONTENDERS, label_each
from paceline.errors import UsageError
from paceline.memory_plan.numbers import parse_bytes
from paceline.option import check_fields, option


@dataclass(frozen=True, slots=True)
class GPTShape:
    """The sizes of one GPT."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    context: int
    dtype: str = "float32"

    @property
    def parameters(self) -> int:
        block = 12 * self.width * self.width + 13 * self.width  # four linear layers with bias, two norms
        embeddings = 2 * self.vocabulary * self.width + self.context * self.width  # tokens, output head, positions
        return embeddings + self.layers * block + 2 * self.width

    @property
    def gradient_bytes(self) -> int:
        return self.parameters * (2 if self.dtype == "bfloat16" else 4)


MODELS = {
    "gpt-tiny": GPTShape(64, 32, 2, 2, 16),
    "gpt-5m": GPTShape(4096, 256, 4, 4, 128),
    "gpt-34m": GPTShape(8192, 512, 8, 8, 128),
    "gpt2": GPTShape(50304, 768, 12, 12, 1024, "bfloat16"),
    "gpt-narrow": GPTShape(50304, 256, 36, 4, 1024, "bfloat16"),  # many small tensors: the host has most to do
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    """The options that all measurements of training share."""

    model: str = option("gpt-5m", f"one of {', '.join(MODELS)}", choices=tuple(MODELS))
    micro_batch: int = option(1, "sequences per microbatch on each rank", low=1)
    warmup: int = option(5, "untimed steps before the timed ones", low=0)
    threads: int = option(1, "compute threads per rank", low=1)
    device: str = option("cpu", "cpu or cuda", choices=("cpu", "cuda"))
    timeout: float = option(180.0, "seconds without an answer after which a contender is dropped", low=1)

    @property
    def shape(self) -> GPTShape:
        return MODELS[self.model]

    def step_spec(self, **settings: Any) -> "StepSpec":
        """The comparison of steps with these options, changed by `settings`."""
        known = {item.name for item in fields(StepSpec)}
        shared = {item.name: getattr(self, item.name) for item in fields(self) if item.name in known}
        return StepSpec(**shared | settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec(TrainingSpec):
    """One comparison of training steps."""

    steps: int = option(30, "timed steps of each contender", low=1)
    ranks: int = option(2, "ranks of each contender", low=1)
    contenders: tuple[str, ...] = option(
        ("floor", "paceline", "torch"),
        f"comma-separated: {', '.join(CONTENDERS)}, or `all`. NAME:KEY=VALUE passes an argument to the wrapper, "
        "paceline@PATH takes paceline from another checkout, FILE.py:NAME takes a contender of your own, and a name "
        "given twice adds an A/A row that shows the noise",
    )
    zero_grad: str = option("none", "what zero_grad sets gradients to: none or zero", choices=("none", "zero"))
    accumulate: int = option(1, "microbatches per step", low=1)
    burst: int = option(3, "timed steps that a contender runs before it is the next one's turn", low=1)
    settle: int = option(
        1, "untimed steps at the start of each burst, while caches still hold another contender's data", low=0
    )
    timing: str = option(
        "step",
        "step: time each step; burst: time a burst as a whole, so that its steps may overlap",
        choices=("step", "burst"),
    )
    compile: bool = option(False, "apply torch.compile to the model before it is wrapped")
    learning_rate: float = option(1e-4, "learning rate of AdamW")
    seed: int = option(0, "seed of weights and data")

    def __post_init__(self) -> None:
        check_fields(self)
        label_each(self.contenders)


def parse_sizes(text: str) -> tuple[int, ...]:
    """`4KiB..1MiB` → 4 KiB, 16 KiB, … 1 MiB; `4KiB,1MiB` → these two."""
    ends = text.split("..", 1)
    sizes = {parse_bytes("sizes", part) for part in (ends if len(ends) == 2 else text.split(","))}
    if any(size % 4 for size in sizes):
        raise UsageError(f"sizes={text!r}: expected multiples of 4 bytes, the size of a float32")
    if len(ends) == 2:
        low, high = (parse_bytes("sizes", end) for end in ends)
        if low > high:
            raise UsageError(f"sizes={text!r}: expected sizes from small to large")
        while low < high:
            sizes.add(low)
            low *= 4
    return tuple(sorted(sizes))
