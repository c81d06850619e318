"""What is measured: models by name, and the settings of each measurement as frozen values."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from paceline.errors import UsageError


@dataclass(frozen=True, slots=True)
class GPTShape:
    """The sizes of one GPT."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    context: int
    dtype: str = "float32"


MODELS = {
    "gpt-tiny": GPTShape(64, 32, 2, 2, 16),
    "gpt-5m": GPTShape(4096, 256, 4, 4, 128),
    "gpt-34m": GPTShape(8192, 512, 8, 8, 128),
    "gpt2": GPTShape(50304, 768, 12, 12, 1024, "bfloat16"),
}


def option(default: Any, about: str) -> Any:
    """A field that command lines show with the text `about`."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True, slots=True)
class ContenderName:
    """`name` or `name:key=value:key=value`: a contender, with arguments for what it wraps the model in."""

    name: str
    arguments: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "ContenderName":
        name, *pairs = text.strip().split(":")
        arguments = []
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not (equals and key.isidentifier()):
                raise UsageError(f"expected a contender as name:key=value, got {text!r}")
            arguments.append((key, _value(value)))
        return cls(name, tuple(arguments))


def _value(text: str) -> Any:
    words: dict[str, Any] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One comparison of training steps."""

    model: str = option("gpt-5m", f"one of {', '.join(MODELS)}")
    micro_batch: int = option(1, "sequences per micro and rank")
    ranks: int = option(2, "ranks of every contender")
    steps: int = option(30, "timed steps of every contender")
    warmup: int = option(5, "steps before the timed ones")
    threads: int = option(1, "compute threads of a rank")
    device: str = option("cpu", "cpu or cuda")
    contenders: tuple[str, ...] = option(
        ("floor", "paceline", "torch"), "comma-separated; `all` for every one; name:key=value passes an argument on"
    )
    zero_grad: str = option("none", "zero_grad sets gradients to none, or to zero")
    accumulate: int = option(1, "micros per step")
    burst: int = option(3, "timed steps that a contender runs before the next one's turn")
    settle: int = option(1, "untimed steps at the begin of each burst, while caches still hold another contender")
    timing: str = option("step", "time each step, or each burst as a whole: then a step may overlap the next one")
    learning_rate: float = option(1e-4, "of AdamW")
    seed: int = option(0, "of weights and data")
    timeout: float = option(180.0, "seconds after which a silent contender is given up")

    def __post_init__(self) -> None:
        _choose("model", self.model, MODELS)
        _choose("device", self.device, ("cpu", "cuda"))
        _choose("zero_grad", self.zero_grad, ("none", "zero"))
        _choose("timing", self.timing, ("step", "burst"))
        _positive(self, "micro_batch", "ranks", "steps", "threads", "accumulate", "burst", "timeout")
        if self.warmup < 0 or self.settle < 0:
            raise UsageError(f"warmup and settle must not be negative, got {self.warmup} and {self.settle}")
        if not self.contenders or len(set(self.contenders)) != len(self.contenders):
            raise UsageError(f"expected one or more contenders, each once, got {list(self.contenders)}")

    @property
    def shape(self) -> GPTShape:
        return MODELS[self.model]


@dataclass(frozen=True, slots=True)
class AllReduceSpec:
    """All-reduce of one flat tensor, by size."""

    sizes: str = option("4KiB..256MiB", "bytes, as FROM..TO (factors of four) or a comma-separated list")
    ranks: int = option(2, "ranks of every contender")
    rounds: int = option(5, "turns of every contender at every size")
    threads: int = option(1, "compute threads of a rank")
    device: str = option("cpu", "cpu or cuda")
    contenders: tuple[str, ...] = option(("paceline", "gloo", "mpi"), "of paceline, gloo, nccl, mpi")
    timeout: float = option(120.0, "seconds after which a silent contender is given up")

    def __post_init__(self) -> None:
        _choose("device", self.device, ("cpu", "cuda"))
        _positive(self, "ranks", "rounds", "threads", "timeout")
        parse_sizes(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSpec:
    """Training steps at several values of one setting, which the kinds of series name and leave out here."""

    over: ClassVar[str]

    values: str
    model: str = option("gpt-5m", f"one of {', '.join(MODELS)}")
    micro_batch: int = option(1, "sequences per micro and rank")
    steps: int = option(12, "timed steps of every contender at every value")
    warmup: int = option(3, "steps before the timed ones")
    threads: int = option(1, "compute threads of a rank")
    device: str = option("cpu", "cpu or cuda")
    contenders: tuple[str, ...] = option(("floor", "paceline", "torch"), "comma-separated, as for `step`")
    zero_grad: str = option("none", "zero_grad sets gradients to none, or to zero")
    timeout: float = option(180.0, "seconds after which a silent contender is given up")

    def __post_init__(self) -> None:
        for value in numbers(self.values):
            self.at(value)

    def at(self, value: int) -> StepSpec:
        """The comparison at one value."""
        settings = _without(self, "values") | {self.over: value}
        return StepSpec(**settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulateSpec(SeriesSpec):
    """Training steps by the number of micros in a step."""

    over: ClassVar[str] = "accumulate"

    values: str = option("1,2,4,8", "micros per step, comma-separated")
    ranks: int = option(2, "ranks of every contender")


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksSpec(SeriesSpec):
    """Training steps by the number of ranks."""

    over: ClassVar[str] = "ranks"

    values: str = option("1,2,3,4,6,8", "numbers of ranks, comma-separated")
    accumulate: int = option(1, "micros per step")


@dataclass(frozen=True, slots=True)
class HooksSpec:
    """What the reducer itself costs per parameter."""

    parameters: str = option("250,500,1000,2000,4000", "numbers of parameters, comma-separated")
    numel: int = option(16, "elements of a parameter: few, so that compute and bytes hardly count")
    worlds: str = option("1,2", "numbers of ranks, comma-separated")
    rounds: int = option(8, "turns of every contender at every number")
    burst: int = option(5, "timed backwards in a turn")
    contenders: tuple[str, ...] = option(("paceline", "torch"), "of paceline, torch")
    timeout: float = option(120.0, "seconds after which a silent contender is given up")

    def __post_init__(self) -> None:
        _positive(self, "numel", "rounds", "burst", "timeout")
        if len(numbers(self.parameters)) < 2:
            raise UsageError(f"a slope needs two numbers of parameters or more, got {self.parameters!r}")
        numbers(self.worlds)
        for name in self.contenders:
            _choose("contenders", name, ("paceline", "torch"))


@dataclass(frozen=True, slots=True)
class CostModelSpec:
    """A model of all-reduce, fitted to measured points, checked against others, and carried on to many ranks."""

    fit_ranks: str = option("2,4", "numbers of ranks whose points the model is fitted to")
    check_ranks: str = option("3,6,8", "numbers of ranks whose points it is checked against")
    sizes: str = option("16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB", "sizes; every second one is fitted to")
    rounds: int = option(4, "turns at every size")
    gradient_bytes: str = option("128MiB", "what is reduced in the forecast")
    ranks_per_host: int = option(8, "ranks of one host in the forecast")
    link_gbit: float = option(100.0, "assumed speed of a host's link, Gbit/s")
    link_latency_us: float = option(10.0, "assumed time of one message between hosts, µs")
    timeout: float = option(120.0, "seconds after which a silent contender is given up")

    def __post_init__(self) -> None:
        _positive(self, "rounds", "ranks_per_host", "link_gbit", "link_latency_us", "timeout")
        for text in (self.fit_ranks, self.check_ranks):
            if min(numbers(text)) < 2:
                raise UsageError(f"an all-reduce needs 2 ranks or more, got {text!r}")
        if len(parse_sizes(self.sizes)) < 3:
            raise UsageError(f"expected three sizes or more, got {self.sizes!r}")
        parse_bytes(self.gradient_bytes)


Spec = TypeVar("Spec")


def numbers(text: str) -> tuple[int, ...]:
    """`1,2,4` → (1, 2, 4)."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"expected comma-separated numbers above 0, got {text!r}")
    return tuple(int(part) for part in parts)


def _without(spec: Any, *names: str) -> dict[str, Any]:
    return {item.name: getattr(spec, item.name) for item in fields(spec) if item.name not in names}


def from_json(kind: type[Spec], settings: dict[str, Any]) -> Spec:
    """A spec from what `dataclasses.asdict` and JSON made of it."""
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()})


UNITS = {"KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "B": 1}


def parse_bytes(text: str) -> int:
    """`64KiB` → 65536."""
    upper = text.strip().upper()
    unit = next((unit for unit in UNITS if upper.endswith(unit)), "")
    digits = upper.removesuffix(unit)
    if not digits.isdecimal() or int(digits) * UNITS.get(unit, 1) < 4 or int(digits) * UNITS.get(unit, 1) % 4:
        raise UsageError(f"expected a size as a multiple of 4 bytes, for instance 64KiB, got {text!r}")
    return int(digits) * UNITS.get(unit, 1)


def parse_sizes(text: str) -> tuple[int, ...]:
    """`4KiB..1MiB` → every fourth power of two between; `4KiB,1MiB` → these."""
    if ".." not in text:
        return tuple(sorted({parse_bytes(part) for part in text.split(",")}))
    low, high = (parse_bytes(part) for part in text.split("..", 1))
    if low > high:
        raise UsageError(f"expected sizes from small to large, got {text!r}")
    sizes = []
    while low < high:
        sizes.append(low)
        low *= 4
    return (*sizes, high)


def show_bytes(count: float) -> str:
    """65536 → `64 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.3g} {unit}" if count < 1000 or unit != "B" else f"{count:.0f} {unit}"
        count /= 1024
    raise AssertionError("the loop returns")


def show_count(count: int) -> str:
    """5300000 → `5.3 M`."""
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"


def show_ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _choose(name: str, value: str, known: Any) -> None:
    if value not in known:
        raise UsageError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def _positive(spec: Any, *names: str) -> None:
    for item in fields(spec):
        value = getattr(spec, item.name)
        if item.name in names and value <= 0:
            raise UsageError(f"{item.name} must be above 0, got {value}")
