"""The numbers of a model and of a batch that a plan is made from. Needs no torch."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.memory_plan.result import MemoryLine
from paceline.memory_plan.storages import Height

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """The numbers of a model, whatever the batch is."""

    name: str  # for people
    count: int  # of its parameters
    trained: int  # of them
    parameter_bytes: int
    gradient_bytes: int
    padding_bytes: int = 0  # what buckets need beside the gradients
    buffer_bytes: int = 0
    workspace_bytes: int = 0  # of cuBLAS
    in_group: int  # elements of the largest group of parameters of the optimizer
    largest: int  # elements of the largest parameter
    last_bucket_bytes: int
    bucket_bytes: int  # of the largest bucket
    turns_bytes: int  # of two buckets that share their memory with all others
    root: int  # elements that are in no unit
    unit: int  # elements of the largest unit
    owned: Callable[[int], int]  # of so many ranks, elements of the one that owns the most
    heap_share: float  # of the parameters, the part in blocks that malloc takes from its heap


@dataclass(frozen=True, slots=True)
class BatchMemory:
    """What comes and goes within one microbatch: its highest points, by the way gradients are held."""

    fresh: tuple[tuple[str, Height], ...]  # each gradient is made by backward and stays
    steady: tuple[tuple[str, Height], ...]  # each is copied when it has been made
    inputs: MemoryLine
    formulas: dict[str, str]  # by kind of storage


BatchMemoryAt = Callable[[int], BatchMemory]


def total(lines: Iterable[MemoryLine]) -> int:
    return sum(line.nbytes for line in lines)


def present(*lines: MemoryLine) -> tuple[MemoryLine, ...]:
    return tuple(line for line in lines if line.nbytes)


def times(size: int, count: int) -> str:
    """A product that can be checked."""
    return f"{size} × {count:,}"
