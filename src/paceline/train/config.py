"""The settings of `paceline train`: one frozen value, from flags or a TOML file. Needs no torch."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from paceline.errors import UsageError
from paceline.memory_plan.setup import PLACEMENTS
from paceline.option import check_fields, option
from paceline.train.sizes import SIZES, Shape

GPU_TOKENS = 16384  # of one microbatch on a GPU, unless set otherwise
GPU_ACTIVATIONS = 300_000_000  # elements of them, at most
NOT_FINITE_EXIT = 3  # gradients were not finite in too many steps in a row


class ConfigError(UsageError):
    """A setting that cannot be used; the message names the field and what it accepts."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. The order here is the order of `--help` and of config.toml."""

    ranks: int = option(0, "processes; 0: one per GPU, or 2 on the CPU", low=0, high=4096, group="Ranks")
    min_ranks: int = option(
        0,
        "replace lost ranks one by one while at least this many are left; 0: restart all ranks",
        low=0,
        high=4096,
        group="Failures",
    )
    spares: int = option(
        0, "with --min-ranks: extra processes that wait to replace lost ranks", low=0, high=4096, group="Failures"
    )
    data: str = option("stdlib", "a text file, a folder, a glob, or `stdlib`: Python's own source files", group="Data")
    tokenizer: str = option("bytes", "bytes, or bpe (trained on the corpus)", choices=("bytes", "bpe"), group="Data")
    vocabulary: int = option(4096, "size of the bpe vocabulary", low=257, high=1_000_000, group="Data")
    size: str = option("tiny", f"one of {', '.join(SIZES)}", choices=tuple(SIZES), group="Model")
    layers: int = option(0, "number of layers; 0: as --size says", low=0, high=1000, group="Model")
    width: int = option(0, "width of the residual stream; 0: as --size says", low=0, high=65536, group="Model")
    heads: int = option(0, "attention heads; 0: as --size says", low=0, high=1024, group="Model")
    context: int = option(0, "tokens per sample; 0: as --size says", low=0, high=1_000_000, group="Model")
    steps: int = option(640, "optimizer steps", low=1, group="Training")
    lanes: int = option(
        8,
        "parts of a global batch; results are bit-identical on any number of ranks up to this; 0: one per rank",
        low=0,
        high=4096,
        group="Ranks",
    )
    batch: int = option(
        0,
        "samples per microbatch of a lane, or of a rank without lanes; 0: 2, or what fills a GPU",
        low=0,
        group="Training",
    )
    accumulate: int = option(1, "microbatches per lane and step", low=1, high=100_000, group="Training")
    learning_rate: float = option(3e-3, "peak learning rate of AdamW", low=0.0, high=10.0, group="Training")
    final_rate: float = option(
        0.05, "final learning rate, as a fraction of the peak", low=0.0, high=1.0, group="Training"
    )
    warmup: int = option(40, "steps until the learning rate reaches its peak", low=0, group="Training")
    decay_steps: int = option(
        0,
        "steps until the learning rate reaches its final value; 0: --steps of the run's first start",
        low=0,
        group="Training",
    )
    weight_decay: float = option(0.1, "weight decay of AdamW, on matrices only", low=0.0, high=1.0, group="Training")
    clip: float = option(1.0, "maximum norm of all gradients together; 0: no limit", low=0.0, group="Training")
    dropout: float = option(0.0, "dropout probability", low=0.0, high=0.9, group="Model")
    dtype: str = option("float32", "float32, or bf16: autocast", choices=("float32", "bf16"), group="Model")
    checkpointing: bool = option(False, "recompute activations in backward instead of keeping them", group="Model")
    compile: bool = option(False, "compile the model with torch.compile", group="Model")
    eval_every: int = option(
        200, "steps between evaluations on held-out text; 0: only at the end", low=0, group="Evaluation"
    )
    eval_samples: int = option(192, "held-out samples per evaluation", low=1, group="Evaluation")
    sample: int = option(240, "tokens of the text sample at the end; 0: none", low=0, high=100_000, group="Evaluation")
    seed: int = option(
        0, "seed of the weights, the order of samples, and dropout", low=0, high=2**63 - 1, group="Training"
    )
    save_every: int = option(200, "steps between checkpoints; 0: only at the end", low=0, group="Checkpoints")
    save_seconds: float = option(0.0, "seconds between checkpoints; 0: by steps only", low=0.0, group="Checkpoints")
    keep: int = option(2, "number of checkpoints to keep", low=2, high=1000, group="Checkpoints")
    resume: str = option(
        "auto", "auto: from the newest checkpoint in --out; never; or the path of one", group="Checkpoints"
    )
    placement: str = option(
        "ddp",
        "what is sharded across ranks: nothing (ddp), optimizer state (zero1), gradients too (zero2), parameters "
        "too (zero3)",
        choices=PLACEMENTS,
        group="Ranks",
    )
    shard: int = option(
        0,
        "consecutive ranks that share one set of shards, such as those of one host; the next ranks hold the same "
        "again; 0: over all",
        low=0,
        high=4096,
        group="Ranks",
    )
    copies: int = option(
        0,
        "how many ranks hold each shard, whatever the number of ranks; 0: one, or as --shard says",
        low=0,
        high=4096,
        group="Ranks",
    )
    transport: str = option(
        "auto", "auto, torch, shm or two-level", choices=("auto", "torch", "shm", "two-level"), group="Ranks"
    )
    device: str = option("auto", "auto, cpu or cuda", choices=("auto", "cpu", "cuda"), group="Ranks")
    threads: int = option(
        0, "compute threads per rank; 0: one with lanes, a share of the cores without", low=0, high=1024, group="Ranks"
    )
    audit: bool = option(False, "write the sample ids of every step", group="Output")
    trackers: str = option("", "comma-separated: tensorboard, wandb, trackio, mlflow", group="Output")
    check_every: int = option(
        64, "steps in which ranks compare their whole state once; 0: never", low=0, group="Failures"
    )
    on_drift: str = option(
        "raise",
        "when the state of ranks differs: raise, or heal it from the majority",
        choices=("raise", "heal"),
        group="Failures",
    )
    audit_every: int = option(
        0,
        "steps between audits, in which another rank computes one lane again and a third decides if they differ; "
        "0: none",
        low=0,
        group="Failures",
    )
    max_restarts: int = option(
        0, "how often the run may be restarted after a failure", low=0, high=1000, group="Failures"
    )
    max_losses: int = option(
        -1, "with --min-ranks: give up when more ranks than this were lost; -1: no limit", low=-1, group="Failures"
    )
    recovery_timeout: float = option(
        600.0, "with --min-ranks: give up after so many seconds with fewer ranks", low=0.0, high=1e9, group="Failures"
    )
    hang_timeout: float = option(
        -1.0,
        "seconds without progress after which a rank counts as hung; -1: learned from the run's own steps; 0: never",
        low=-1.0,
        high=1e9,
        group="Failures",
    )
    shutdown_timeout: float = option(
        30.0,
        "seconds that ranks have to save and leave when asked to end",
        low=0.0,
        high=1e9,
        group="Failures",
    )
    out: str = option("", "folder of the run; empty: runs/<time>", group="Output")

    # A run may be resumed with other values of these. They do not change what is computed, except for `decay_steps`,
    # which is meant to be changed, `ranks` without lanes, which changes the global batch, and the last bits by
    # `threads`, `device` and `compile`, which is warned about, and by `placement`, `shard` and `copies`
    # without lanes.
    FREE: ClassVar[frozenset[str]] = frozenset(
        {
            *("ranks", "steps", "decay_steps", "eval_every", "eval_samples", "sample", "save_every", "save_seconds"),
            *("keep", "resume", "transport", "device", "threads", "audit", "trackers", "check_every", "on_drift"),
            *("audit_every", "max_restarts", "out", "compile", "placement", "shard", "copies"),
            *("min_ranks", "spares", "max_losses", "recovery_timeout", "hang_timeout", "shutdown_timeout"),
        }
    )

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        shape = self.shape
        if shape.width % shape.heads:
            raise ConfigError(f"width={shape.width} and heads={shape.heads}: expected a width divisible by the heads")
        if self.audit_every and (not self.lanes or self.placement == "zero3"):
            raise ConfigError(
                f"audit_every={self.audit_every} with lanes={self.lanes} and placement={self.placement!r}: expected "
                f"lanes, which one rank can run alone: --lanes 8, and a --placement other than zero3"
            )
        if self.shard and self.copies:
            raise ConfigError(
                f"shard={self.shard} and copies={self.copies} say the same in two ways: expected one of them at most"
            )
        name, value = ("copies", self.copies) if self.copies else ("shard", self.shard)
        if value > 1 and self.placement == "ddp":
            raise ConfigError(f"{name}={value}: placement='ddp' makes no shards; expected zero1, zero2 or zero3")

    @property
    def shape(self) -> Shape:
        """The model's shape: the size's, with what was given explicitly in its place."""
        given = {name: getattr(self, name) for name in ("layers", "width", "heads", "context")}
        return replace(SIZES[self.size], **{name: value for name, value in given.items() if value})

    def settled(self, *, on_gpu: bool) -> "TrainConfig":
        """With a batch size for the device, if none was given.

        A GPU needs some thousand tokens at once to be busy, and its memory bounds them: activations take about 34 bytes
        for each token, layer and element of the width.
        """
        if self.batch:
            return self
        shape, batch = self.shape, 2
        if on_gpu:
            per_sample = shape.context * shape.layers * shape.width
            while 2 * batch * shape.context <= GPU_TOKENS and 2 * batch * per_sample <= GPU_ACTIVATIONS:
                batch *= 2
        return replace(self, batch=batch)

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of ranks that does not suit the lanes or the shards."""
        name, value = ("copies", self.copies) if self.copies else ("shard", self.shard)
        if value and ranks % value:
            possible = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
            raise ConfigError(f"{name}={value} does not divide {ranks} ranks; expected 0 or one of {possible}")
        if self.max_losses >= 0 and not self.min_ranks:
            raise ConfigError(
                f"max_losses={self.max_losses} and min_ranks=0: ranks are replaced one by one, and lost ones counted, "
                f"only with --min-ranks; expected a minimum of at least 1, or max_restarts"
            )
        if self.min_ranks > ranks:
            raise ConfigError(f"min_ranks={self.min_ranks}: expected at most the {ranks} ranks of this run")
        if self.lanes and ranks > self.lanes:
            raise ConfigError(
                f"{ranks} ranks and lanes={self.lanes}: expected at least one lane per rank; use more --lanes or fewer "
                f"--ranks"
            )
        if self.placement == "zero3" and self.lanes % ranks:
            raise ConfigError(
                f"{ranks} ranks and lanes={self.lanes} with placement='zero3', where all ranks gather the same "
                f"parameters at the same time: expected as many lanes on each rank, such as --lanes "
                f"{-(-self.lanes // ranks) * ranks}; or use --placement zero2"
            )

    def shard_size(self, ranks: int) -> int:
        """Over how many of so many ranks shards are made; 0: over all."""
        return ranks // self.copies if self.copies else self.shard

    def samples_of_step(self, ranks: int) -> int:
        """How many samples a step takes, on all ranks together."""
        return self.batch * self.accumulate * (self.lanes or ranks)


def from_toml(file: Path) -> dict[str, Any]:
    """The settings in a TOML file: at the top level, or in a table [train]."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {file} cannot be read: {error}") from error
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or tables within tables
        raise ConfigError(f"the configuration {file} is not TOML: {error}") from error
    table = found.get("train", found)
    if not isinstance(table, dict):
        raise ConfigError(f"[train] in {file}: expected a table of settings, got {table!r}")
    return table


def build(settings: Mapping[str, Any]) -> TrainConfig:
    """A configuration from names and values; unknown names are refused."""
    known = {item.name for item in fields(TrainConfig)}
    normal = {name.replace("-", "_"): value for name, value in settings.items()}
    for name in normal:
        if name not in known:
            raise ConfigError(f"{name!r} is not a setting: expected one of {', '.join(sorted(known))}")
    return TrainConfig(**normal)


def to_toml(config: TrainConfig) -> str:
    """The configuration as a file that `from_toml` reads, with what each setting means."""
    lines = []
    for item in fields(config):
        # All that a setting can be is written alike in JSON and in TOML.
        value = json.dumps(getattr(config, item.name), ensure_ascii=False)
        lines.append(f"{item.name} = {value}  # {item.metadata['about']}")
    return "\n".join(lines) + "\n"
