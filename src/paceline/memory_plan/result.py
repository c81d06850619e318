"""A plan as a value: lines that add up, the moments of a step, and traffic. Needs no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.memory_plan.numbers import PlanError


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One item that takes memory, with the formula behind the figure."""

    name: str
    nbytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class StepMoment:
    """What is allocated at one point of a step."""

    name: str
    lines: tuple[MemoryLine, ...]

    @property
    def total(self) -> int:
        return sum(line.nbytes for line in self.lines)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one step between ranks, and whether they hide behind backward."""

    sent_bytes: int  # by each rank
    last_bucket_bytes: int = 0  # leaves when backward ends: nothing is left to hide behind
    link_bytes_per_s: float | None = None
    backward_s: float | None = None
    in_forward_bytes: int = 0  # of them: parameters that are gathered while forward runs
    formula: str = ""

    @property
    def seconds(self) -> float | None:
        """On the link, when its speed is known."""
        return None if self.link_bytes_per_s is None else self.sent_bytes / self.link_bytes_per_s

    @property
    def forward_s(self) -> float:
        """About half the time of backward."""
        return (self.backward_s or 0.0) / 2

    @property
    def exposed_s(self) -> float | None:
        """What backward cannot hide; None when the link or the compute is not known."""
        if self.sent_bytes == 0:
            return 0.0
        if self.seconds is None or self.link_bytes_per_s is None or self.backward_s is None:
            return None
        forward_s, last_s = (
            self.in_forward_bytes / self.link_bytes_per_s,
            self.last_bucket_bytes / self.link_bytes_per_s,
        )
        return max(0.0, forward_s - self.forward_s) + max(self.seconds - forward_s - self.backward_s, last_s)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank in a world of `ranks`."""

    ranks: int
    moments: tuple[StepMoment, ...]
    outside: tuple[MemoryLine, ...]  # what torch's allocators do not count
    traffic: Traffic
    largest_batch: int | None = None  # None: the device's memory is not known; 0: not even one sample fits
    instead: tuple[str, ...] = ()  # what would fit, if this does not

    @property
    def peak(self) -> StepMoment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def total(self) -> int:
        """Bytes at the highest moment, as torch's allocator counts them."""
        return self.peak.total

    @property
    def total_with_outside(self) -> int:
        return self.total + sum(line.nbytes for line in self.outside)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory and traffic of one rank, for one or several world sizes.

    `str()` gives the verdict and the table, `chart(path)` a picture. `lines`, `total` and `largest_batch` are those of
    the first world size; `by_ranks` has all of them.
    """

    subject: str
    convention: str
    parameters: int
    batch: int | None
    device: str
    by_ranks: tuple[RankPlan, ...]
    device_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[MemoryLine, ...]:
        return self.by_ranks[0].peak.lines

    @property
    def total(self) -> int:
        return self.by_ranks[0].total

    @property
    def largest_batch(self) -> int | None:
        """The largest batch of one rank that fits; None if the device's memory was not given."""
        return self.by_ranks[0].largest_batch

    def at(self, ranks: int) -> RankPlan:
        """The plan for a world of `ranks`."""
        for plan in self.by_ranks:
            if plan.ranks == ranks:
                return plan
        known = ", ".join(str(plan.ranks) for plan in self.by_ranks)
        raise PlanError(f"ranks={ranks}: this plan was made for {known}")

    def fits(self, device_bytes: int | None = None) -> bool:
        """Whether every rank fits on its device, with what lies outside torch's allocator."""
        available = self.device_bytes if device_bytes is None else device_bytes
        if available is None:
            raise PlanError(
                "device_bytes=None: expected the memory of one device in bytes, or a plan with device_memory="
            )
        return all(plan.total_with_outside <= available for plan in self.by_ranks)

    def check_fits(self, device_bytes: int | None = None) -> None:
        """Raise `PlanError`, with what would fit, if some rank does not fit on its device."""
        if not self.fits(device_bytes):
            from paceline.memory_plan.table import verdict

            device_bytes = self.device_bytes if device_bytes is None else device_bytes
            raise PlanError("; ".join([*verdict(self, device_bytes), self.subject]))

    def against(self, measured_bytes: int, *, ranks: int | None = None) -> str:
        """This plan beside a measurement of the second step or a later one, as a table.

        The first step is not like the others: the optimizer makes its states at the end of it.
        """
        from paceline.memory_plan.table import against

        return against(self, measured_bytes, ranks=ranks)

    def to_json(self) -> dict[str, Any]:
        """All figures, for `json.dump`."""
        return {
            "schema": "paceline-plan/1",
            "subject": self.subject,
            "convention": self.convention,
            "parameters": self.parameters,
            "batch": self.batch,
            "device": self.device,
            "device_bytes": self.device_bytes,
            "notes": list(self.notes),
            "by_ranks": [_rank_json(plan) for plan in self.by_ranks],
        }

    def chart(self, path: str | Path) -> None:
        """Draw one bar per world size. Needs matplotlib."""
        from paceline.memory_plan.plan_chart import draw

        draw(self, Path(path))

    def __str__(self) -> str:
        from paceline.memory_plan.table import render

        return render(self)


def _rank_json(plan: RankPlan) -> dict[str, Any]:
    def lines(of: tuple[MemoryLine, ...]) -> list[dict[str, Any]]:
        return [{"name": line.name, "bytes": line.nbytes, "formula": line.formula} for line in of]

    return {
        "ranks": plan.ranks,
        "total_bytes": plan.total,
        "total_with_outside_bytes": plan.total_with_outside,
        "peak_moment": plan.peak.name,
        "lines": lines(plan.peak.lines),
        "outside": lines(plan.outside),
        "moments": {moment.name: moment.total for moment in plan.moments},
        "sent_bytes": plan.traffic.sent_bytes,
        "communication_s": plan.traffic.seconds,
        "backward_s": plan.traffic.backward_s,
        "exposed_s": plan.traffic.exposed_s,
        "largest_batch": plan.largest_batch,
        "would_fit": list(plan.instead),
    }
