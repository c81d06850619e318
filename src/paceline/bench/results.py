"""Results as values, and the JSON in which they are stored."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline.bench.checkout import commit_of
from paceline.bench.contenders import ContenderName
from paceline.bench.processes import ContenderFailed
from paceline.bench.statistics import flat, percentile
from paceline.process_status import cpu_model

PACKAGES = (
    "torch",
    "paceline",
    "accelerate",
    "lightning-fabric",
    "deepspeed",
    "megatron-core",
    "mpi4py",
    "mpich",
    "tensorflow",
)

LINE_LENGTH = 120  # of JSON that is not samples


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
        hardware = _describe_hardware() | {"gpu": gpu}
        names = {label: ContenderName.parse(label) for label in contenders}
        commits = {label: commit_of(Path(found.sources)) for label, found in names.items() if found.checkout}
        versions = _describe_versions() | commits
        when = datetime.now(UTC).isoformat(timespec="seconds")
        # Where a file lies on this machine is nobody's business: a result may be published.
        arguments = [Path(text).name if text.startswith("/") else text for text in sys.argv[1:]]
        return cls(when, f"{program} {shlex.join(arguments)}", hardware, versions)


def _describe_hardware() -> dict[str, Any]:
    """CPU, cores and memory of this machine. The workers report its GPU, because they load torch."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


def _describe_versions() -> dict[str, str]:
    """Versions of the packages that take part, if they are installed."""
    found = {"python": platform.python_version(), "paceline": "source tree"}
    for package in (*PACKAGES, "tensorflow-cpu"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


@dataclass
class TimedResult:
    """What is known of every contender that trains. Times are in seconds and of the slowest rank."""

    label: str
    about: str
    state: str = "ok"  # or "failed", "not installed", "not here"
    message: str = ""  # why there is no result
    log: str = ""
    samples_s: list[list[float]] = field(default_factory=list)  # one list per round
    median_s: float | None = None
    p10_s: float | None = None
    p90_s: float | None = None
    losses: list[float] = field(default_factory=list)  # mean over ranks
    loss_difference: float | None = None  # from the reference, relative, at most
    agrees: bool | None = None  # with the reference; None: not to be compared

    def summarize(self) -> None:
        samples = flat(self.samples_s)
        self.median_s, self.p10_s, self.p90_s = (percentile(samples, percent) for percent in (50, 10, 90))

    def compare_losses(self, reference: list[float], tolerance: float) -> None:
        pairs = zip(self.losses, reference, strict=True)
        self.loss_difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
        self.agrees = self.loss_difference <= tolerance


def record_failures(results: Mapping[str, TimedResult], failures: Mapping[str, ContenderFailed]) -> None:
    for label, failure in failures.items():
        results[label].state, results[label].message, results[label].log = "failed", str(failure), failure.log


@dataclass
class BenchReport:
    """All results of one command."""

    spec: dict[str, Any]
    circumstances: Circumstances


# ---- JSON


def write_json(report: Any, file: Path) -> None:
    """Write a report, a dataclass, with every sample."""
    file.write_text(dump_json(asdict(report)), encoding="utf-8")


def dump_json(value: Any) -> str:
    """JSON in which each array of samples takes one line, and so does everything else that fits."""
    return _pretty(value, "") + "\n"


def _pretty(value: Any, indent: str) -> str:
    inner = indent + " "
    text = json.dumps(value)
    if len(indent + text) <= LINE_LENGTH or not isinstance(value, dict | list | tuple) or _is_samples(value):
        return text
    if isinstance(value, dict):
        items = [f"{json.dumps(str(key))}: {_pretty(item, inner)}" for key, item in value.items()]
    else:
        items = [_pretty(item, inner) for item in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([begin, ",\n".join(inner + item for item in items), indent + end])


def _is_samples(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_samples, value))
    return isinstance(value, int | float | None)
