"""A plan as a value: lines that add up, moments, traffic, verdicts. Needs no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.memory_plan.states import PlanError


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that takes memory, with the sum behind the figure."""

    name: str
    nbytes: int
    formula: str
    late_bytes: int = 0  # of them, what the first optimizer step makes: not there before it


@dataclass(frozen=True, slots=True)
class Moment:
    """What is there at one point of a step."""

    name: str
    lines: tuple[Line, ...]
    is_update: bool = False  # the optimizer's step

    @property
    def total(self) -> int:
        return sum(line.nbytes for line in self.lines)

    @property
    def total_in_first_step(self) -> int:
        return self.total if self.is_update else sum(line.nbytes - line.late_bytes for line in self.lines)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one step between ranks, and whether they hide behind backward."""

    sent_bytes: int  # by each rank: 2 (n - 1) / n of the gradients
    last_bucket_bytes: int = 0  # leaves when backward ends: nothing is left to hide behind
    link_bytes_per_s: float | None = None
    backward_s: float | None = None

    @property
    def seconds(self) -> float | None:
        """On the link, when its speed is known."""
        return None if self.link_bytes_per_s is None else self.sent_bytes / self.link_bytes_per_s

    @property
    def exposed_s(self) -> float | None:
        """What backward cannot hide; None when the link or the compute is not known."""
        if self.sent_bytes == 0:
            return 0.0
        if self.seconds is None or self.link_bytes_per_s is None or self.backward_s is None:
            return None
        return max(self.seconds - self.backward_s, self.last_bucket_bytes / self.link_bytes_per_s)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank of a world of `ranks`."""

    ranks: int
    moments: tuple[Moment, ...]
    outside: tuple[Line, ...]  # that no allocator of torch's sees
    traffic: Traffic
    largest_batch: int | None = None  # None: not asked for; 0: not even one sample fits

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def total(self) -> int:
        """Bytes at the highest moment, as torch's allocator counts them."""
        return self.peak.total

    @property
    def first_step_total(self) -> int:
        """The same for the very first step, which makes the optimizer's states at its end."""
        return max(moment.total_in_first_step for moment in self.moments)

    @property
    def total_with_outside(self) -> int:
        return self.total + sum(line.nbytes for line in self.outside)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory and traffic of one rank, for one or several sizes of the world.

    `str()` gives the table, `chart(path)` a picture. `lines`, `total` and `largest_batch` are those of the first
    size of the world; `by_ranks` has all of them.
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
    def lines(self) -> tuple[Line, ...]:
        return self.by_ranks[0].peak.lines

    @property
    def total(self) -> int:
        return self.by_ranks[0].total

    @property
    def first_step_total(self) -> int:
        return self.by_ranks[0].first_step_total

    @property
    def largest_batch(self) -> int | None:
        """The largest batch of one rank that fits; None when no `device_bytes` were given."""
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
            raise PlanError("device_bytes=None: expected the memory of one device in bytes, here or in plan()")
        return all(plan.total_with_outside <= available for plan in self.by_ranks)

    def against(self, measured_bytes: int, *, ranks: int | None = None, first_step: bool = False) -> str:
        """This plan beside a measurement, as a table.

        `first_step`: the measurement ends with the very first step, in which the optimizer's states come last.
        """
        from paceline.memory_plan.measured import against

        return against(self, measured_bytes, ranks=ranks, first_step=first_step)

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
        """Draw one bar per size of the world. Needs matplotlib."""
        from paceline.memory_plan.chart import draw

        draw(self, Path(path))

    def __str__(self) -> str:
        from paceline.memory_plan.text import render

        return render(self)


def _rank_json(plan: RankPlan) -> dict[str, Any]:
    def lines(of: tuple[Line, ...]) -> list[dict[str, Any]]:
        return [{"name": line.name, "bytes": line.nbytes, "formula": line.formula} for line in of]

    return {
        "ranks": plan.ranks,
        "total_bytes": plan.total,
        "first_step_bytes": plan.first_step_total,
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
    }
