"""What `paceline train` can be told: one frozen value, from flags or a TOML file. Needs no torch."""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from paceline.errors import UsageError
from paceline.option import option
from paceline.train.sizes import SIZES, Shape

CHOICES = {
    "tokenizer": ("bytes", "bpe"),
    "size": tuple(SIZES),
    "dtype": ("float32", "bf16"),
    "transport": ("auto", "torch", "shm", "two-level"),
    "device": ("auto", "cpu", "cuda"),
    "on_drift": ("raise", "heal"),
}
# Lowest and highest value; None: no highest.
BOUNDS: dict[str, tuple[float, float | None]] = {
    "ranks": (0, 4096),
    "vocabulary": (257, 1_000_000),
    "layers": (0, 1000),
    "width": (0, 65536),
    "heads": (0, 1024),
    "context": (0, 1_000_000),
    "steps": (1, None),
    "lanes": (0, 4096),
    "batch": (0, None),
    "accumulate": (1, 100_000),
    "learning_rate": (0.0, 10.0),
    "final_rate": (0.0, 1.0),
    "warmup": (0, None),
    "decay_steps": (0, None),
    "weight_decay": (0.0, 1.0),
    "clip": (0.0, None),
    "dropout": (0.0, 0.9),
    "eval_every": (0, None),
    "eval_samples": (1, None),
    "seed": (0, 2**63 - 1),
    "save_every": (0, None),
    "save_seconds": (0.0, None),
    "keep": (2, 1000),
    "threads": (0, 1024),
    "sample": (0, 100_000),
    "max_restarts": (0, 1000),
    "check_every": (0, None),
}
GPU_TOKENS = 16384  # of one microbatch on a GPU, if nothing else is said
GPU_ACTIVATIONS = 300_000_000  # elements of them, at most
NOT_FINITE_EXIT = 3  # gradients were not finite in too many steps in a row


class ConfigError(UsageError):
    """A setting that cannot be used; the message names the field and what it accepts."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. The order here is the order of `--help` and of config.toml."""

    ranks: int = option(0, "processes; 0: one per GPU, or 2 on the CPU")
    data: str = option("stdlib", "a text file, a folder, a glob, or `stdlib`: Python's own source files")
    tokenizer: str = option("bytes", "bytes, or bpe (trained on the corpus)")
    vocabulary: int = option(4096, "size of the bpe vocabulary")
    size: str = option("tiny", f"one of {', '.join(SIZES)}")
    layers: int = option(0, "instead of the size's own; 0: the size's")
    width: int = option(0, "instead of the size's own")
    heads: int = option(0, "instead of the size's own")
    context: int = option(0, "tokens of one sample, instead of the size's own")
    steps: int = option(640, "optimizer steps")
    lanes: int = option(8, "parts of a global batch; any number of ranks up to it gives the same bits; 0: one per rank")
    batch: int = option(0, "samples of one microbatch of a lane, or of a rank without lanes; 0: 2, or what fills a GPU")
    accumulate: int = option(1, "micros of one lane in one step")
    learning_rate: float = option(3e-3, "highest rate of AdamW")
    final_rate: float = option(0.05, "the rate at the end, as a part of the highest")
    warmup: int = option(40, "steps until the highest rate")
    decay_steps: int = option(0, "steps until the final rate, which then stays; 0: --steps of the run's first start")
    weight_decay: float = option(0.1, "of AdamW, on matrices only")
    clip: float = option(1.0, "largest norm of all gradients together; 0: no limit")
    dropout: float = option(0.0, "probability of dropout")
    dtype: str = option("float32", "float32, or bf16: autocast")
    checkpointing: bool = option(False, "recompute activations in backward instead of keeping them")
    compile: bool = option(False, "torch.compile the model")
    eval_every: int = option(200, "steps between evaluations on held-out text; 0: at the end only")
    eval_samples: int = option(192, "held-out samples of an evaluation")
    sample: int = option(240, "tokens of the text sample at the end; 0: none")
    seed: int = option(0, "of weights, order of samples, and dropout")
    save_every: int = option(200, "steps between checkpoints; 0: at the end only")
    save_seconds: float = option(0.0, "seconds between checkpoints; 0: by steps only")
    keep: int = option(2, "checkpoints kept")
    resume: str = option("auto", "auto: from the newest checkpoint in --out; never; or the path of one")
    transport: str = option("auto", f"one of {', '.join(CHOICES['transport'])}")
    device: str = option("auto", "cpu, cuda, or auto")
    threads: int = option(0, "compute threads of a rank; 0: one with lanes, its share of the cores without")
    audit: bool = option(False, "write the sample ids of every step")
    trackers: str = option("", "comma-separated: tensorboard, wandb, trackio, mlflow")
    check_every: int = option(64, "steps in which ranks have compared all of their state; 0: never")
    on_drift: str = option("raise", "when the state of ranks differs: raise, or heal it from the majority")
    max_restarts: int = option(0, "how often the run may be restarted after a failure")
    out: str = option("", "folder of the run; empty: runs/<time>")

    # A run may be resumed with other values of these. Of what is computed they change nothing, but for `decay_steps`,
    # which is there to be changed, `ranks` without lanes, which changes the global batch, and the last bits by
    # `threads`, `device` and `compile`, which is warned of.
    FREE: ClassVar[frozenset[str]] = frozenset(
        {
            *("ranks", "steps", "decay_steps", "eval_every", "eval_samples", "sample", "save_every", "save_seconds"),
            *("keep", "resume", "transport", "device", "threads", "audit", "trackers", "check_every", "on_drift"),
            *("max_restarts", "out", "compile"),
        }
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            _check_type(item.name, getattr(self, item.name), item.default)
        for name, (low, high) in BOUNDS.items():
            _check_bounds(name, getattr(self, name), low, high)
        for name, accepted in CHOICES.items():
            if getattr(self, name) not in accepted:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(accepted)}")
        shape = self.shape
        if shape.width % shape.heads:
            raise ConfigError(f"width={shape.width} and heads={shape.heads}: expected a width divisible by the heads")

    @property
    def shape(self) -> Shape:
        """The model's shape: the size's, with what was given explicitly in its place."""
        given = {name: getattr(self, name) for name in ("layers", "width", "heads", "context")}
        return replace(SIZES[self.size], **{name: value for name, value in given.items() if value})

    def settled(self, *, on_gpu: bool) -> "TrainConfig":
        """With a batch for where it runs, if none was given.

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
    except tomllib.TOMLDecodeError as error:
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
    floats = {item.name for item in fields(TrainConfig) if isinstance(item.default, float)}
    whole = {name: float(v) for name, v in normal.items() if name in floats and type(v) is int}
    return TrainConfig(**{**normal, **whole})


def to_toml(config: TrainConfig) -> str:
    """The configuration as a file that `from_toml` reads, with what each setting means."""
    lines = []
    for item in fields(config):
        lines.append(f"{item.name} = {_toml(getattr(config, item.name))}  # {item.metadata['about']}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
        return f'"{escaped}"'
    return repr(value)


def _check_type(name: str, value: Any, default: Any) -> None:
    assert default is not MISSING
    kind = type(default)
    if type(value) is not kind:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise ConfigError(f"{name}={value!r}: expected {words[kind]}")


def _check_bounds(name: str, value: float, low: float, high: float | None) -> None:
    if not (value >= low and (high is None or value <= high)):  # also when it is not a number
        wanted = f"at least {low:g}" if high is None else f"{low:g} to {high:g}"
        raise ConfigError(f"{name}={value!r}: expected {wanted}")
