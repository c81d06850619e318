"""Who takes part. Nothing here loads torch: a contender's module is imported in the contender's own processes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from paceline.bench.checkout import sources_in
from paceline.errors import UsageError

AGAIN = " (A/A)"


@dataclass(frozen=True, slots=True)
class ContenderName:
    """`name@PATH:key=value:key=value`: a contender, with arguments for what it wraps the model in. `@PATH` takes
    paceline from another checkout."""

    name: str
    arguments: tuple[tuple[str, Any], ...] = ()
    checkout: str = ""

    @classmethod
    def parse(cls, text: str) -> "ContenderName":
        whole, *pairs = text.strip().removesuffix(AGAIN).split(":")
        name, at, checkout = whole.partition("@")
        if at and not checkout:
            raise UsageError(f"expected the path of a checkout after the @, got {text!r}")
        arguments = []
        for pair in pairs:
            key, equals, value = pair.partition("=")
            if not (equals and key.isidentifier()):
                raise UsageError(f"expected a contender as name:key=value, got {text!r}")
            arguments.append((key, _value(value)))
        return cls(name, tuple(arguments), checkout)

    @property
    def sources(self) -> str:
        """The folder to import the other checkout's paceline from; empty when there is no other."""
        return str(sources_in(self.checkout)) if self.checkout else ""


def label_each(names: Iterable[str]) -> tuple[str, ...]:
    """A contender that is named twice runs twice: it is compared with itself, so the second row shows the noise."""
    labels: list[str] = []
    for name in names:
        labels.append(f"{name}{AGAIN}" if name in labels else name)
    if not labels or len(set(labels)) != len(labels):
        raise UsageError(
            f"expected one or more contenders, each once, or twice for an A/A row that shows the noise; got {labels}"
        )
    return tuple(labels)


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
class Contender:
    """One way to train the model."""

    name: str
    about: str
    module: str  # under paceline.bench.contenders; its `build` makes the trainee
    needs: tuple[str, ...] = ()  # modules beyond torch
    one_process: bool = False  # with the batches of all ranks
    synchronises: bool = True
    same_weights: bool = True  # starts from the same weights as the others
    launcher: str = "plain"  # or "mpiexec"
    task: str = "torch"  # or "tensorflow"
    devices: tuple[str, ...] = ("cpu", "cuda")
    in_all: bool = True  # whether `all` names it; the parts of one comparison are not peers

    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in self.needs if find_spec(name) is None)


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("floor", "no synchronisation", "torch_ways", synchronises=False),
        Contender("bare", "the module alone", "torch_ways", synchronises=False, in_all=False),
        Contender("paceline", "paceline.DistributedDataParallel", "ours"),
        Contender("paceline-torch", 'paceline with transport="torch"', "ours"),
        Contender("lanes", "paceline with a lane for every micro of every rank", "ours", in_all=False),
        Contender("lanes-torch", 'the same with transport="torch"', "ours", in_all=False),
        Contender("agreement", 'paceline, Agreement(state_every=64, not_finite="skip")', "ours", in_all=False),
        Contender("no-agreement", 'paceline, Agreement(state_every=0, not_finite="keep")', "ours", in_all=False),
        Contender("torch", "torch DDP, gradient_as_bucket_view=True", "torch_ways"),
        Contender("fsdp2", "torch fully_shard", "torch_ways"),
        Contender("replicate", "torch replicate", "torch_ways"),
        Contender("single", "one process, the same global batch", "torch_ways", one_process=True),
        Contender(
            "dataparallel",
            "torch.nn.DataParallel, one process, the same global batch; on a CPU it is the bare module",
            "torch_ways",
            one_process=True,
        ),
        Contender("accelerate", "Hugging Face Accelerate", "clients", needs=("accelerate",)),
        Contender("fabric", "Lightning Fabric, strategy=ddp", "clients", needs=("lightning_fabric",)),
        Contender("deepspeed1", "DeepSpeed ZeRO stage 1", "deepspeed", needs=("deepspeed",)),
        Contender("deepspeed2", "DeepSpeed ZeRO stage 2", "deepspeed", needs=("deepspeed",)),
        Contender("fusion", "tensor fusion on a background thread, as Horovod does", "fusion"),
        Contender(
            "mpi4py",
            "one flat MPI all-reduce after backward",
            "mpi",
            needs=("mpi4py",),
            launcher="mpiexec",
            devices=("cpu",),
        ),
        Contender(
            "tensorflow",
            "TensorFlow MultiWorkerMirroredStrategy, own weights",
            "tensorflow",
            needs=("tensorflow",),
            same_weights=False,
            task="tensorflow",
            devices=("cpu",),
        ),
    )
}


def find_contender(text: str) -> Contender:
    """The contender that `text` (a name, perhaps with arguments) names."""
    return CONTENDERS[parse_known(text, (*CONTENDERS, "all")).name]


def parse_known(text: str, known: Sequence[str]) -> ContenderName:
    """`text` as the name of a contender, which has to be one of those that are `known` to a measurement."""
    found = ContenderName.parse(text)
    if found.name not in known:
        raise UsageError(f"there is no contender {found.name!r}; expected some of {', '.join(known)}")
    if found.checkout and (found.name not in CONTENDERS or CONTENDERS[found.name].module != "ours"):
        raise UsageError(f"{text!r}: only paceline's own contenders can come from another checkout")
    return found
