"""Results as values: what a run found, ready to be written as JSON."""

import json
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.bench.checkout import commit_of
from paceline.bench.contenders import ContenderName
from paceline.bench.figures import Ratio
from paceline.bench.hardware import describe_hardware, describe_versions


@dataclass
class Circumstances:
    """Where, when and how something was measured."""

    date: str
    command: str
    hardware: dict[str, Any]
    versions: dict[str, str]

    @classmethod
    def now(cls, gpu: str | None = None, contenders: Iterable[str] = ()) -> "Circumstances":
        program = Path(sys.argv[0]).name.replace("__main__.py", "python -m paceline.bench")
        command = f"{program} {shlex.join(sys.argv[1:])}"
        hardware = describe_hardware() | {"gpu": gpu}
        names = {label: ContenderName.parse(label) for label in contenders}
        commits = {label: commit_of(Path(found.sources)) for label, found in names.items() if found.checkout}
        versions = describe_versions() | commits
        return cls(datetime.now(UTC).isoformat(timespec="seconds"), command, hardware, versions)


@dataclass
class ContenderResult:
    """One contender's figures. Times are in seconds and of the slowest rank."""

    label: str
    about: str
    state: str  # "ok", "failed", "not installed" or "not here"
    ranks: int
    message: str = ""  # why there is no result
    log: str = ""
    notes: list[str] = field(default_factory=list)
    samples_s: list[list[float]] = field(default_factory=list)  # one list per round
    median_s: float | None = None
    p10_s: float | None = None
    p90_s: float | None = None
    to_torch: Ratio | None = None
    to_floor: Ratio | None = None
    above_floor_s: float | None = None  # step − floor
    above_floor_to_torch: float | None = None
    communication_s: float | None = None
    overlap: float | None = None  # the part of communication that is hidden
    overlap_from: str = ""  # "trace", or "alone": 1 − above floor / communication with nothing to hide under
    predicted_exposed_s: float | None = None  # communication while the rank could only wait, by the bucket plan
    traced_exposed_s: float | None = None  # the same, by the trace
    sent_bytes: int | None = None  # per rank and step, by the algorithm
    peak_bytes: int | None = None  # while training, of the rank with most
    start_peak_bytes: int | None = None  # until the end of warm-up
    peak_bytes_per_parameter: float | None = None
    phases_s: dict[str, float] = field(default_factory=dict)
    bucket_bytes: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of every step, warm-up included; mean over ranks
    digest: float | None = None  # sum of |parameter|
    replicas_equal: bool | None = None
    agrees: bool | None = None  # with the reference; None: not to be compared
    loss_difference: float | None = None  # of the last step, relative


@dataclass
class StepReport:
    """All that `paceline bench step` found."""

    spec: dict[str, Any]
    circumstances: Circumstances
    parameters: int
    gradient_bytes: int
    contenders: list[ContenderResult]
    schema: str = "paceline-bench-step/2"

    def result(self, label: str) -> ContenderResult | None:
        """A contender's result, when it has one."""
        return next((found for found in self.contenders if found.label == label and found.state == "ok"), None)


@dataclass
class AllReduceRow:
    """One contender at one size."""

    label: str
    nbytes: int
    samples_s: list[list[float]]
    median_s: float
    p10_s: float
    p90_s: float
    bytes_per_s: float  # size / time
    speedup: dict[str, float] = field(default_factory=dict)  # over each other contender


@dataclass
class AllReduceReport:
    """All that `paceline bench allreduce` found."""

    spec: dict[str, Any]
    circumstances: Circumstances
    rows: list[AllReduceRow]
    absent: dict[str, str]  # contender: why it is not there
    transport: str = ""  # that paceline chose
    schema: str = "paceline-bench-allreduce/1"


@dataclass
class SeriesReport:
    """Step comparisons at several values of one setting."""

    spec: dict[str, Any]
    circumstances: Circumstances
    over: str  # the setting's name
    points: list[tuple[int, StepReport]]
    schema: str = "paceline-bench-series/1"


@dataclass
class LanesRow:
    """Lanes beside the plain mode at the same number of micros."""

    transport: str
    lanes: int
    ranks: int
    plain_s: float
    lanes_s: float
    ratio: Ratio
    allowed_ratio: float | None  # where every rank runs one lane
    more_copies: float | None  # of all gradients, that lanes held at most beyond the plain mode
    allowed_copies: int


@dataclass
class LanesReport:
    """All that `paceline bench lanes` found."""

    spec: dict[str, Any]
    circumstances: Circumstances
    rows: list[LanesRow]
    points: list[StepReport]
    schema: str = "paceline-bench-lanes/1"


@dataclass
class AgreementReport:
    """All that `paceline bench agreement` found."""

    spec: dict[str, Any]
    circumstances: Circumstances
    ratio: Ratio | None  # step with all checks / step without, over all starts; None if one of them failed
    by_start: list[float]
    allowed_ratio: float
    points: list[StepReport]  # one per start
    schema: str = "paceline-bench-agreement/1"


@dataclass
class HooksRow:
    """What one contender adds to the bare model, in one world."""

    label: str
    world: int
    parameters: list[int]
    bare_s: list[float]  # medians, one per number of parameters
    median_s: list[float]
    slope_s: float  # per parameter, over the bare model
    fixed_s: float
    to_torch: Ratio | None = None  # of whole steps, with as many parameters as there were at most


@dataclass
class HooksReport:
    """All that `paceline bench hooks` found."""

    spec: dict[str, Any]
    circumstances: Circumstances
    rows: list[HooksRow]
    samples_s: dict[str, dict[int, list[list[float]]]]  # contender@world, parameters, rounds
    failures: dict[str, str]
    schema: str = "paceline-bench-hooks/1"


@dataclass
class MachineryResult:
    """One contender's figures. Times are of one step, in seconds."""

    label: str
    about: str
    state: str = "ok"  # or "failed"
    message: str = ""  # why there is no result
    log: str = ""
    samples_s: list[list[float]] = field(default_factory=list)  # one turn each: the mean over its steps
    losses: list[float] = field(default_factory=list)  # at the end of every turn
    median_s: float | None = None
    p10_s: float | None = None
    p90_s: float | None = None
    to_bare: Ratio | None = None
    added_per_tensor_s: float | None = None  # (step − bare) / tensors
    loss_difference: float | None = None  # from bare, relative, at most
    agrees: bool | None = None


@dataclass
class MachineryReport:
    """All that `paceline bench machinery` found."""

    spec: dict[str, Any]
    circumstances: Circumstances
    parameters: int
    tensors: int
    contenders: list[MachineryResult]
    schema: str = "paceline-bench-machinery/1"


@dataclass
class CostFit:
    """T = α·messages + β·bytes for one contender under one algorithm."""

    label: str
    algorithm: str
    alpha_s: float
    beta_s_per_byte: float
    fitted_error: float  # median |predicted / measured − 1|
    checked_error: float | None  # of the points it was not fitted to


@dataclass
class CostPoint:
    """One measured point beside what the model says."""

    label: str
    ranks: int
    nbytes: int
    measured_s: float
    predicted_s: float
    fitted: bool


@dataclass
class Forecast:
    """One algorithm at one number of ranks."""

    algorithm: str
    ranks: int
    seconds: float
    messages: float  # one after another
    sent_bytes: float  # per rank


@dataclass
class CostModelReport:
    """All that `paceline bench cost-model` found."""

    spec: dict[str, Any]
    circumstances: Circumstances
    fits: list[CostFit]
    points: list[CostPoint]
    forecast: list[Forecast]
    assumptions: list[str]
    schema: str = "paceline-bench-cost-model/1"


def write_json(report: Any, file: Path) -> None:
    file.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
