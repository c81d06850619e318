"""What is trained: one line for every case, made by small products and pruned to what the library accepts.

A case's name says what is not as usual in it: `torch-3 lanes-8 weight` is three ranks over gloo, eight lanes, and
microbatches that count by their tokens.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import product

STEPS = 5  # buckets are planned anew after the first and after the third


@dataclass(frozen=True)
class Case:
    """One training run."""

    transport: str
    ranks: int
    lanes: int = 0
    accumulate: str = ""  # three microbatches per step, or per lane
    weight: str = ""  # microbatches count by their tokens, which differ
    reduction: str = "mean"
    dtype: str = "float32"
    model: str = "plain"
    buckets: str = "planned"
    loop: str = "plain"
    optimizer: str = "sgd"

    @property
    def name(self) -> str:
        told = [f"{self.transport}-{self.ranks}"] + ([f"lanes-{self.lanes}"] if self.lanes else [])
        for field in fields(self)[3:]:
            if (value := getattr(self, field.name)) != field.default:
                told.append(value)
        return " ".join(told)

    @property
    def bucket_settings(self) -> dict[str, object]:
        """Arguments of the replica. Planned buckets follow from measured times: where their bounds decide about the
        order of additions (in gloo's rings of three and more) or about what is sent (top-k), torch's sizes are kept."""
        if self.buckets == "tiny":
            return {"bucket_cap_mb": 1e-4}
        rings = self.transport == "torch" and self.ranks > 2 and self.reduction != "fixed-order" and not self.lanes
        return {"bucket_plan": "fixed"} if rings or self.reduction == "topk" else {}

    @property
    def bits(self) -> str:
        """What decides about the result of a run in lanes: all but who computes it."""
        return replace(self, transport="any", ranks=0, buckets="planned").name


def legal(case: Case) -> bool:
    """Whether the library accepts it, and it is not another case under a second name."""
    if case.lanes and (case.lanes < case.ranks or not _goes_with_lanes(case)):
        return False
    if case.transport == "local" and case.ranks > 1:
        return False
    if case.loop.startswith("join") and case.transport not in ("shm", "torch"):
        return False
    if case.model == "noise":  # its numbers follow from the lane, where generators belong to one rank
        return bool(case.lanes) and case.transport != "threads"
    return True


def _goes_with_lanes(case: Case) -> bool:
    return (
        case.reduction == "mean"
        and case.accumulate in ("", "no_sync")
        and case.model not in ("sparse", "reentrant")
        and case.loop in ("plain", "skip", "clip", "not-finite")
    )


def world(text: str) -> tuple[str, int]:
    transport, _, ranks = text.rpartition("-")
    return transport, int(ranks)


def several(worlds: str, **axes: Iterable[object]) -> Iterator[Case]:
    """The product of the worlds and of the values of every axis, as far as it is legal."""
    for where, *values in product(worlds.split(), *axes.values()):
        transport, ranks = world(str(where))
        given: dict[str, object] = dict(zip(axes, values, strict=True))
        case = Case(transport, ranks, **given)  # type: ignore[arg-type]
        if legal(case):
            yield case


EVERYWHERE = "local-1 shm-2 shm-3 shm-4 shm-8 torch-2 torch-3 torch-4 torch-8 two-level-3 two-level-4 threads-3"
THREE = "shm-3 torch-3"
KINDS = ("unused", "frozen", "shared", "sparse", "empty", "buffers", "dtypes", "reentrant")


def _all() -> Iterator[Case]:
    # Every world, with what changes how gradients are divided.
    yield from several(EVERYWHERE)
    yield from several(EVERYWHERE, accumulate=["no_sync"], weight=["weight"])
    yield from several("torch-4 two-level-3", accumulate=["by-hand"])
    yield from several("shm-2 threads-3", accumulate=["switched"])
    yield from several("shm-3 torch-3 two-level-4", weight=["weight"])
    yield from several("shm-3 torch-3", weight=["weight"], accumulate=["by-hand"])
    # Lanes: one digest for every world.
    yield from several(EVERYWHERE, lanes=[8], model=["noise"])
    yield from several("local-1 shm-2 threads-3", lanes=[8])
    yield from several(
        "local-1 shm-2 shm-3 torch-3 torch-8 two-level-3", lanes=[8], weight=["weight"], accumulate=["no_sync"]
    )
    yield from several("local-1 shm-4 threads-3", lanes=[4], model=["buffers"])
    yield from several("local-1 shm-2 torch-4 two-level-3", lanes=[5], model=["buffers"])
    yield from several("local-1 shm-3 torch-3", lanes=[4], loop=["skip", "clip", "not-finite"])
    yield from several("local-1 torch-2 shm-3", lanes=[4], model=["unused", "shared", "dtypes"], buckets=["tiny"])
    yield from several("local-1 shm-3 torch-3", lanes=[4], dtype=["bfloat16", "float64"])
    # How buckets are combined.
    yield from several(THREE, reduction=["fixed-order", "bf16", "fp16", "topk"])
    yield from several("shm-8 torch-8 two-level-4 threads-3", reduction=["fixed-order"])
    yield from several(THREE, reduction=["fp32", "fixed-order"], dtype=["bfloat16"])
    yield from several(THREE, reduction=["fixed-order", "topk"], model=["sparse"])
    yield from several("shm-4 torch-2", reduction=["bf16", "topk"], weight=["weight"], accumulate=["no_sync"])
    # Types, kinds of parameters, buckets.
    yield from several("shm-3 torch-3 two-level-4", dtype=["bfloat16", "float64"])
    yield from several(THREE, model=KINDS)
    yield from several("shm-3 torch-4", buckets=["tiny"])
    yield from several(THREE, model=["reentrant"], buckets=["tiny"])
    yield from several("torch-2 two-level-3", model=["unused", "sparse"], buckets=["tiny"])
    # How the loop is written.
    loops = ("skip", "join", "explicit", "closure", "clip", "mixed", "hook", "static", "not-finite", "heal")
    yield from several(THREE, loop=loops)
    yield from several(THREE, loop=["join-present"])
    yield from several("shm-3", loop=["join-present"], accumulate=["no_sync"])
    yield from several("local-1 shm-4 torch-2", optimizer=["adam"])


CASES = {case.name: case for case in _all()}
