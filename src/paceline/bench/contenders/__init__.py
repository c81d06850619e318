"""The contenders: those that take part, by name. Nothing here loads torch; a contender is built in processes of its
own.

A contender of your own is a function of a file, named as `FILE.py:FUNCTION`:

    def mine(context: BuildContext) -> Trainee: ...     # both of paceline.bench.contenders.trainee

or a `Contender` instead of the function, to say more about it:

    mine = Contender("my wrapper", build, needs=("mine",), devices=("cpu",))
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from paceline.bench.checkout import sources_in
from paceline.bench.loading import load_named
from paceline.errors import UsageError

AGAIN = " (A/A)"


@dataclass(frozen=True, slots=True)
class ContenderName:
    """`NAME@CHECKOUT:KEY=VALUE:KEY=VALUE` or `FILE.py:NAME:KEY=VALUE`, with arguments for the model's wrapper."""

    name: str
    arguments: tuple[tuple[str, Any], ...] = ()
    checkout: str = ""
    file: str = ""

    @classmethod
    def parse(cls, text: str) -> "ContenderName":
        first, *pairs = text.strip().removesuffix(AGAIN).split(":")
        file = ""
        if first.endswith(".py"):
            if not (pairs and pairs[0].isidentifier()):
                raise UsageError(f"expected a contender as FILE.py:NAME, got {text!r}")
            file, first = first, pairs.pop(0)
        name, at, checkout = first.partition("@")
        if at and not checkout:
            raise UsageError(f"expected the path of a checkout after the @, got {text!r}")
        arguments = []
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not (equals and key.isidentifier()):
                raise UsageError(f"expected a contender as name:key=value, got {text!r}")
            arguments.append((key, _value(value)))
        return cls(name, tuple(arguments), checkout, file)

    @property
    def sources(self) -> str:
        """The folder to import the other checkout's paceline from; empty when there is none."""
        return str(sources_in(self.checkout)) if self.checkout else ""


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


def label_each(names: Iterable[str]) -> tuple[str, ...]:
    """A contender that is named twice runs twice: the second row compares it with itself, which shows the noise."""
    labels: list[str] = []
    for name in names:
        labels.append(f"{name}{AGAIN}" if name in labels else name)
    if not labels or len(set(labels)) != len(labels):
        raise UsageError(
            f"expected one or more contenders, each once, or twice for an A/A row that shows the noise; got {labels}"
        )
    return tuple(labels)


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train the model, or to all-reduce."""

    about: str
    build: str | Callable[..., Any] = ""  # makes a Trainee of a BuildContext; "module:function" of this package
    task: Callable[..., Any] | None = None  # instead of `build`: a Task of its own, with its own timed loop
    needs: tuple[str, ...] = ()  # modules beyond torch
    one_process: bool = False  # with the batches of all ranks
    synchronizes: bool = True
    same_weights: bool = True  # starts from the same weights as the others
    mpiexec: bool = False  # its ranks are started by mpiexec
    devices: tuple[str, ...] = ("cpu", "cuda")
    in_all: bool = True  # `all` includes it

    def why_absent(self, device: str) -> str:
        """Why the contender cannot run here, as `state: reason`; empty if it can."""
        if missing := [name for name in self.needs if find_spec(name) is None]:
            return f"not installed: {', '.join(missing)}: pip install 'paceline[peers]'"
        return "" if device in self.devices else f"not here: runs on {', '.join(self.devices)} only"

    def builder(self) -> Callable[..., Any]:
        """The function that builds the trainee. This loads torch."""
        if not isinstance(self.build, str):
            return self.build
        found: Callable[..., Any] = load_named(f"paceline.bench.contenders.{self.build}")
        return found


CONTENDERS = {
    "floor": Contender("no synchronization", "torch_peers:unwrapped", synchronizes=False),
    "bare": Contender("the module alone", "torch_peers:unwrapped", synchronizes=False, in_all=False),
    "paceline": Contender("paceline.DistributedDataParallel", "ours:build"),
    "paceline-torch": Contender('paceline with transport="torch"', "ours:build"),
    "lanes": Contender("paceline with a lane for every microbatch of every rank", "ours:build", in_all=False),
    "lanes-torch": Contender('the same with transport="torch"', "ours:build", in_all=False),
    "lanes-checksums-torch": Contender("lanes-torch, with checksums on what is sent", "ours:build", in_all=False),
    "lanes-audited": Contender("lanes, with an audit in every step", "ours:build", in_all=False),
    "agreement": Contender('paceline, Agreement(state_every=64, not_finite="skip")', "ours:build", in_all=False),
    "no-agreement": Contender('paceline, Agreement(state_every=0, not_finite="keep")', "ours:build", in_all=False),
    "zero1": Contender('paceline with placement="zero1"', "ours:build", in_all=False),
    "zero2": Contender('paceline with placement="zero2"', "ours:build", in_all=False),
    "zero3": Contender('paceline with placement="zero3"', "ours:build", in_all=False),
    "torch": Contender("torch DDP, gradient_as_bucket_view=True", "torch_peers:ddp"),
    "fsdp2": Contender("torch fully_shard", "torch_peers:fsdp2"),
    "zero-redundancy": Contender("torch DDP and ZeroRedundancyOptimizer", "torch_peers:zero_redundancy", in_all=False),
    "single": Contender("one process, the same global batch", "torch_peers:unwrapped", one_process=True),
}


def find_contender(text: str, known: Mapping[str, Contender] = CONTENDERS, *, files: bool = True) -> Contender:
    """The contender that `text` names, perhaps with arguments: one of those that a measurement knows, or, if it takes
    `files`, one that a file defines."""
    name = ContenderName.parse(text)
    if name.file and files:
        return _load(name)
    if name.file or name.name not in known:
        where = (
            "; contenders of other libraries are FILE.py:NAME in benchmarks/peers of the repository" if files else ""
        )
        raise UsageError(f"there is no contender {text!r}; expected some of {', '.join(known)}{where}")
    if name.checkout and not (name.name in CONTENDERS and CONTENDERS[name.name].build == "ours:build"):
        raise UsageError(f"{text!r}: only paceline's own contenders can come from another checkout")
    return known[name.name]


def _load(name: ContenderName) -> Contender:
    """The contender of a file."""
    found = load_named(f"{name.file}:{name.name}")
    if isinstance(found, Contender):
        return found
    if not callable(found):
        raise UsageError(f"{name.file} has no contender {name.name!r}: expected a function or a Contender of that name")
    return Contender((found.__doc__ or name.name).splitlines()[0], found)


def short_label(label: str) -> str:
    """A label as tables and charts show it: without the folder and file that a contender comes from."""
    return label.rpartition(".py:")[2]
