"""A fault as a value: what goes wrong, on which rank, in which step, and where in it. Needs no torch.

kill rank=1 step=20
stop rank=0 step=5 where=backward seconds=10
flip rank=2 step=7 tensor=3 bit=22
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from paceline.errors import UsageError
from paceline.phase import Phase

FAULTS_NAME = "PACELINE_FAULTS"  # the variable by which faults travel to ranks
SEPARATOR = ";"
EVERY_RANK = -1
FOR_EVER = math.inf

PLACES = {
    "start": Phase.IDLE,
    "data": Phase.DATA,
    "forward": Phase.FORWARD,
    "backward": Phase.BACKWARD,
    "update": Phase.OPTIMIZER,
    "between": Phase.BETWEEN,
    "wait": Phase.WAITING,
    "save": Phase.CHECKPOINT,
    "load": Phase.LOAD,
    "evaluate": Phase.EVALUATE,
}


class Kind(NamedTuple):
    """What a kind of fault does, which options it takes, and where it happens if nothing else is said."""

    about: str
    options: tuple[str, ...] = ()
    where: str = "forward"


_LASTS = ("seconds",)
_TENSOR = ("tensor",)
KINDS: Mapping[str, Kind] = {
    "kill": Kind("SIGKILL: the process is gone at once, as when a machine goes away"),
    "crash": Kind("SIGSEGV: a crash in native code"),
    "exit": Kind("the process exits with `code`, without a word", ("code",)),
    "raise": Kind("the script's own code raises an exception"),
    "preempt": Kind("SIGTERM, as a scheduler sends it before it takes the machine away"),
    "stop": Kind("SIGSTOP: the process does nothing at all, for `seconds` or for ever", _LASTS),
    "freeze": Kind("native code holds the interpreter's lock (GIL), for `seconds` or for ever", _LASTS),
    "spin": Kind("Python code runs in circles, for `seconds` or for ever", _LASTS),
    "sleep": Kind("the script waits for something that does not come, for `seconds` or for ever", _LASTS),
    "slow": Kind("from this step on, `where` takes `seconds` longer in every step", _LASTS),
    "oom": Kind("takes memory until the OOM killer comes; refused without a memory limit of the control group"),
    "disk-full": Kind("no file can be written (ENOSPC), for `seconds` or for ever", _LASTS, "save"),
    "no-files": Kind("no further file or connection can be opened (EMFILE), for ever"),
    "kill-worker": Kind("SIGKILL to a DataLoader worker of this rank"),
    "stop-worker": Kind("SIGSTOP to a DataLoader worker of this rank"),
    "flip": Kind(
        "flips bit `bit` of the first element of parameter `tensor`, counted over the optimizers", ("tensor", "bit")
    ),
    "flip-state": Kind("the same in the optimizer's state of that parameter, a moment for instance", ("tensor", "bit")),
    "nan": Kind("the next gradient of parameter `tensor` has a NaN, before it is reduced", _TENSOR),
    "scale": Kind(
        "the next gradient of parameter `tensor` is `factor` times as large, before it is reduced", ("tensor", "factor")
    ),
}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault. It happens the first time that the rank comes to `where` in `step` or later, `times` times in a job.

    A step is one optimizer step, counted from 0 by each process, or by the trainer and by elastic jobs from the start
    of the run. `rank=-1` is every rank.
    """

    kind: str
    rank: int
    step: int
    where: str = ""
    times: int = 1
    seconds: float = FOR_EVER
    code: int = 1
    tensor: int = 0
    bit: int = 20
    factor: float = 1.0001

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(
                f"there is no fault {self.kind!r}{_meant(self.kind, KINDS)}; expected one of {', '.join(KINDS)}"
            )
        if not self.where:
            object.__setattr__(self, "where", KINDS[self.kind].where)
        if self.where not in PLACES:
            raise UsageError(
                f"fault {self.kind}: where={self.where!r} is not known: expected one of {', '.join(PLACES)}"
            )
        for name, low, high in _LIMITS:
            value = getattr(self, name)
            if not low <= value <= high:  # NaN is not either
                most = "" if high == math.inf else f" and at most {high}"
                raise UsageError(f"fault {self.kind}: {name}={value} is not possible: expected at least {low}{most}")
        for name in _OPTIONS - {*KINDS[self.kind].options}:
            if getattr(self, name) != _DEFAULTS[name]:
                takes = ", ".join((*_ALWAYS, *KINDS[self.kind].options))
                raise UsageError(f"fault {self.kind} takes no {name}=; expected some of {takes}")
        if self.kind == "slow" and self.seconds == FOR_EVER:
            raise UsageError("fault slow: expected seconds=, by which each step takes longer, such as seconds=0.5")

    @property
    def phase(self) -> Phase:
        """What the rank has to begin for the fault to happen."""
        return PLACES[self.where]

    def concerns(self, rank: int) -> bool:
        return self.rank in (rank, EVERY_RANK)

    def __str__(self) -> str:
        """As `parse` reads it, without what need not be said."""
        said = {name: getattr(self, name) for name in (*_ALWAYS, *KINDS[self.kind].options)}
        rest = {**_DEFAULTS, "where": KINDS[self.kind].where}
        rank = "all" if self.rank == EVERY_RANK else self.rank
        words = [
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in said.items()
            if rest.get(name) != value
        ]
        return " ".join([self.kind, *[f"rank={rank}" if word.startswith("rank=") else word for word in words]])


_ALWAYS = ("rank", "step", "where", "times")
_DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(Fault) if one.name not in ("kind", "rank", "step")}
_OPTIONS = _DEFAULTS.keys() - {"where", "times"}
_NUMBERS: dict[str, type[int] | type[float]] = {
    **dict.fromkeys(("rank", "step", "times", "code", "tensor", "bit"), int),
    **dict.fromkeys(("seconds", "factor"), float),
}
_LIMITS = (
    ("rank", EVERY_RANK, math.inf),
    ("step", 0, math.inf),
    ("times", 1, math.inf),
    ("seconds", 0.0, math.inf),
    ("code", 0, 255),
    ("tensor", 0, math.inf),
    ("bit", 0, 63),
    ("factor", -1e30, 1e30),
)


def parse(text: str) -> Fault:
    """The fault that `text` describes, such as `kill rank=1 step=20`. Raises UsageError for anything else."""
    kind, *words = text.split() or [""]
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in (*_ALWAYS, *_OPTIONS):
            raise UsageError(
                f"fault {text!r}: {word!r} is not understood{_meant(name, (*_ALWAYS, *_OPTIONS))}; expected "
                f"`KIND rank=R step=S`, then where=, times= or what the kind takes"
            )
        if name in found:
            raise UsageError(f"fault {text!r}: {name}= is given twice")
        found[name] = _value(text, name, value)
    if kind in KINDS and (missing := [name for name in ("rank", "step") if name not in found]):
        raise UsageError(
            f"fault {text!r}: {missing[0]}= is missing; expected for instance `{kind or 'kill'} rank=1 step=20`"
        )
    return Fault(kind=kind, **{"rank": 0, "step": 0, **found})


def parse_all(text: str) -> tuple[Fault, ...]:
    """Several faults, separated by semicolons, as the variable PACELINE_FAULTS holds them."""
    return tuple(parse(part) for part in text.split(SEPARATOR) if part.strip())


def asked_for(environ: Mapping[str, str], texts: Iterable[str]) -> tuple[Fault, ...]:
    """The faults of a job: those of the variable PACELINE_FAULTS, and those of a command line."""
    return (*parse_all(environ.get(FAULTS_NAME, "")), *map(parse, texts))


def format_all(faults: tuple[Fault, ...]) -> str:
    """What `parse_all` reads."""
    return f"{SEPARATOR} ".join(map(str, faults))


def once_less(faults: tuple[Fault, ...], happened: Fault) -> tuple[Fault, ...]:
    """What is left of `faults` after one of them has happened once."""
    left = (
        replace(fault, times=fault.times - 1) if fault == happened and fault.times > 1 else fault for fault in faults
    )
    return tuple(fault for fault in left if fault != happened)


def _value(text: str, name: str, value: str) -> Any:
    if name == "where":
        return value
    if name == "rank" and value == "all":
        return EVERY_RANK
    kind = _NUMBERS[name]
    try:
        number = kind(value)
    except ValueError:
        number = -1
    if (name != "factor" and number < 0) or not value.isascii() or "_" in value:
        whole = "a whole number" if kind is int else "a number"
        more = ", or all" if name == "rank" else ""
        raise UsageError(f"fault {text!r}: {name}={value!r} is not possible; expected {whole} of at least 0{more}")
    return number


def _meant(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""
