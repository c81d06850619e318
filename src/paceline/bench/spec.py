"""What is measured: models by name, and the settings of each measurement as frozen values."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from paceline.bench.contenders import CONTENDERS, label_each, parse_known
from paceline.errors import UsageError
from paceline.memory_plan.numbers import parse_list
from paceline.option import option


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
    "gpt-narrow": GPTShape(50304, 256, 36, 4, 1024, "bfloat16"),  # many small tensors: the host has most to do
}


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
        ("floor", "paceline", "torch"),
        f"comma-separated, of {', '.join(CONTENDERS)}; `all` for every peer; name:key=value passes an argument on, "
        "paceline@PATH takes another checkout, and a name given twice is an A/A row",
    )
    zero_grad: str = option("none", "zero_grad sets gradients to none, or to zero")
    accumulate: int = option(1, "micros per step")
    burst: int = option(3, "timed steps that a contender runs before the next one's turn")
    settle: int = option(1, "untimed steps at the begin of each burst, while caches still hold another contender")
    timing: str = option("step", "time each step, or each burst as a whole: then a step may overlap the next one")
    lanes: bool = option(False, "also paceline with lanes, one for every micro: the contender `lanes`")
    compile: bool = option(False, "torch.compile the model before it is wrapped")
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
        label_each(self.contenders)

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
    contenders: tuple[str, ...] = option(("paceline", "gloo", "mpi"), "of paceline, paceline@PATH, gloo, nccl, mpi")
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
        for value in parse_list("values", self.values):
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


# The plain mode and lanes, by the way that gradients take. paceline's own choice on CPUs of one host is shm.
LANE_PAIRS = {
    "local": ("paceline", "lanes"),
    "shm": ("paceline", "lanes"),
    "torch": ("paceline-torch", "lanes-torch"),
}


@dataclass(frozen=True, slots=True)
class LanesSpec:
    """What lanes cost beside the plain mode at equal work: as many micros in all, accumulated where ranks are fewer."""

    lanes: str = option("2,8", "numbers of lanes, comma-separated")
    ranks: str = option("1,2", "numbers of ranks, comma-separated; those that do not divide the lanes are left out")
    transport: tuple[str, ...] = option(("shm", "torch"), "of shm, torch; on cuda and for one rank there is one way")
    model: str = option("gpt-5m", f"one of {', '.join(MODELS)}")
    micro_batch: int = option(1, "sequences per micro")
    steps: int = option(30, "timed steps of every contender at every point")
    warmup: int = option(5, "steps before the timed ones")
    threads: int = option(1, "compute threads of a rank")
    device: str = option("cpu", "cpu or cuda")
    timeout: float = option(180.0, "seconds after which a silent contender is given up")

    def __post_init__(self) -> None:
        for name in self.transport:
            _choose("transport", name, ("shm", "torch"))
        for lanes, ranks in self.points():
            self.at(lanes, ranks)
        if not self.points():
            raise UsageError(
                f"lanes={self.lanes!r}, ranks={self.ranks!r}: the plain mode has as many micros on every rank, so "
                f"expected a number of ranks that divides a number of lanes"
            )

    def points(self) -> list[tuple[int, int]]:
        """(lanes, ranks) that are compared."""
        many, worlds = parse_list("lanes", self.lanes), parse_list("ranks", self.ranks)
        return [(lanes, ranks) for lanes in many for ranks in worlds if lanes % ranks == 0]

    def ways(self, ranks: int) -> list[str]:
        """The transports that are compared with so many ranks."""
        if ranks == 1:
            return ["local"]
        return ["torch"] if self.device == "cuda" else list(dict.fromkeys(self.transport))

    def at(self, lanes: int, ranks: int) -> StepSpec:
        """The comparison at one point."""
        labels = tuple(label for way in self.ways(ranks) for label in LANE_PAIRS[way])
        settings = _without(self, "lanes", "ranks", "transport")
        return StepSpec(ranks=ranks, accumulate=lanes // ranks, contenders=labels, **settings)


@dataclass(frozen=True, slots=True)
class AgreementSpec:
    """What ranks pay for checking each other in every step."""

    model: str = option("gpt-5m", f"one of {', '.join(MODELS)}")
    micro_batch: int = option(1, "sequences per micro and rank")
    ranks: int = option(2, "ranks of both")
    steps: int = option(120, "timed steps of both at every start")
    starts: int = option(3, "how often both are started anew: where memory lies changes a step by more than is sought")
    warmup: int = option(5, "steps before the timed ones")
    threads: int = option(1, "compute threads of a rank")
    device: str = option("cpu", "cpu or cuda")
    timeout: float = option(180.0, "seconds after which a silent contender is given up")

    def __post_init__(self) -> None:
        _positive(self, "starts")
        self.each()

    def each(self) -> StepSpec:
        """The comparison of one start."""
        return StepSpec(contenders=("no-agreement", "agreement"), **_without(self, "starts"))


@dataclass(frozen=True, slots=True)
class HooksSpec:
    """What the reducer itself costs per parameter."""

    parameters: str = option("250,500,1000,2000,4000,10000", "numbers of parameters, comma-separated")
    numel: int = option(16, "elements of a parameter: few, so that compute and bytes hardly count")
    worlds: str = option("1,2", "numbers of ranks, comma-separated")
    rounds: int = option(8, "turns of every contender at every number")
    burst: int = option(5, "timed backwards in a turn")
    contenders: tuple[str, ...] = option(("paceline", "torch"), "of paceline, paceline@PATH, torch")
    timeout: float = option(120.0, "seconds after which a silent contender is given up")

    def __post_init__(self) -> None:
        _positive(self, "numel", "rounds", "burst", "timeout")
        if len(parse_list("parameters", self.parameters)) < 2:
            raise UsageError(f"a slope needs two numbers of parameters or more, got {self.parameters!r}")
        parse_list("worlds", self.worlds)
        for label in label_each(self.contenders):
            parse_known(label, ("paceline", "torch"))


MACHINERY = ("bare", "torch", "paceline", "no-agreement")


@dataclass(frozen=True, slots=True)
class MachinerySpec:
    """What the machinery alone costs: one rank does all that it would do among several, and the network costs
    nothing."""

    model: str = option("gpt-5m", f"one of {', '.join(MODELS)}")
    micro_batch: int = option(1, "sequences per step")
    device: str = option("cpu", "cpu or cuda")
    backend: str = option(
        "auto", "of torch.distributed, as nccl; auto is gloo on a CPU and cpu:gloo,cuda:nccl on a GPU"
    )
    compile: bool = option(False, "torch.compile the model before it is wrapped")
    contenders: tuple[str, ...] = option(
        ("bare", "bare", "torch", "paceline", "no-agreement"),
        f"comma-separated, of {', '.join(MACHINERY)}; paceline@PATH takes another checkout, and a name given twice is "
        "an A/A row",
    )
    rounds: int = option(10, "turns of every contender")
    burst: int = option(10, "steps that are timed together in a turn, with one synchronisation at their end")
    settle: int = option(2, "untimed steps at the begin of each turn, while caches still hold another contender")
    warmup: int = option(6, "steps before the first turn")
    threads: int = option(1, "compute threads")
    learning_rate: float = option(1e-5, "of AdamW; the batch is always the same")
    seed: int = option(0, "of weights and data")
    timeout: float = option(180.0, "seconds after which a silent contender is given up")

    def __post_init__(self) -> None:
        _positive(self, "rounds", "burst")
        for label in label_each(self.contenders):
            parse_known(label, MACHINERY)
        if "bare" not in self.contenders:
            raise UsageError(f"contenders={','.join(self.contenders)}: all are compared with `bare`, which is missing")
        self.step()

    def step(self) -> StepSpec:
        """The training step that is measured."""
        return StepSpec(ranks=1, **_without(self, "backend", "rounds"))


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
        for name in ("fit_ranks", "check_ranks"):
            text = getattr(self, name)
            if min(parse_list(name, text)) < 2:
                raise UsageError(f"{name}={text!r}: an all-reduce needs 2 ranks or more")
        if len(parse_sizes(self.sizes)) < 3:
            raise UsageError(f"expected three sizes or more, got {self.sizes!r}")
        parse_bytes(self.gradient_bytes)


Spec = TypeVar("Spec")


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
