"""From what is always there and what comes and goes to the plan of each size of the world. Needs no torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.memory_plan.numbers import lane_copies
from paceline.memory_plan.states import optimizer_of, precision_of
from paceline.memory_plan.timeline import GRADIENTS, Height
from paceline.memory_plan.value import Line, Moment, RankPlan, Traffic

MIB = 2**20
BUCKET_BYTES = 25 * MIB
# Not counted by torch's allocator and not the same everywhere; `fits` would be wrong without them, so they are named.
CUDA_CONTEXT_BYTES = 512 * MIB
NCCL_BYTES = 512 * MIB
INTERPRETER_BYTES = 384 * MIB
# On the CPU the process is larger than its tensors. With glibc the holes were 12 to 19 % of the blocks in its heap on
# GPTs of 5 to 163 million parameters, and on one of them up to 35 % in one run of ten: they vary from run to run.
HEAP_HOLES = 0.15
LIBRARY_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True)
class Stock:
    """What is there whatever the batch is."""

    always: tuple[Line, ...]  # parameters first, then master copy, states, buffers, workspaces
    gradients: Line  # all of them
    padding: Line  # what buckets need beside them
    update: tuple[Line, ...]  # what the optimizer's step needs for a moment
    last_bucket_bytes: int
    device: str
    heap_share: float  # of the parameters, the part in blocks that malloc takes from its heap


@dataclass(frozen=True, slots=True)
class Course:
    """What comes and goes within one micro: where it is highest, by the way gradients are held."""

    fresh: tuple[tuple[str, Height], ...]  # each gradient is made by backward and stays
    steady: tuple[tuple[str, Height], ...]  # memory of all gradients is there all the time
    formulas: tuple[tuple[str, str], ...]
    inputs: Line

    def formula(self, kind: str) -> str:
        return dict(self.formulas).get(kind, "followed with tensors that have no memory")


@dataclass(frozen=True, slots=True)
class Wish:
    """How gradients travel and what they must fit on."""

    ranks: tuple[int, ...]
    accumulate: int = 1
    device_bytes: int | None = None
    link_bytes_per_s: float | None = None
    backward_s: float | None = None
    lanes: int | None = None


CourseAt = Callable[[int | None], Course | None]


def rank_plans(stock: Stock, course_at: CourseAt, wish: Wish) -> tuple[RankPlan, ...]:
    """One plan per size of the world. `course_at(batch)` tells what comes and goes; None asks for the given batch."""
    return tuple(_rank_plan(stock, course_at, wish, ranks) for ranks in wish.ranks)


def _rank_plan(stock: Stock, course_at: CourseAt, wish: Wish, ranks: int) -> RankPlan:
    course = course_at(None)
    largest = None
    if wish.device_bytes is not None and course is not None:
        room = wish.device_bytes - sum(line.nbytes for line in _outside(stock.device, ranks))

        def fits(batch: int) -> bool:
            there = max(moment.total for moment in moments(stock, course_at(batch), wish, ranks))
            return there <= room

        largest = largest_that(fits)
    return RankPlan(
        ranks,
        moments(stock, course, wish, ranks),
        _outside(stock.device, ranks),
        _traffic(stock, wish, ranks),
        largest,
    )


def moments(stock: Stock, course: Course | None, wish: Wish, ranks: int) -> tuple[Moment, ...]:
    """The points of a step at which memory may be highest."""
    buckets = ranks > 1 or wish.lanes is not None
    copies = lane_copies(wish.lanes, ranks) if wish.lanes is not None else 0
    sums = Line("sums of lanes", copies * stock.gradients.nbytes, f"{copies} × gradients: of the lanes before")
    held = (stock.gradients, stock.padding, *_present(sums)) if buckets else (stock.gradients,)
    # Buckets are made once and lie apart; gradients that autograd makes come from malloc, again and again.
    scattered = 0 if buckets else int(stock.heap_share * stock.gradients.nbytes)
    inputs = (course.inputs,) if course is not None else ()
    beside = _beside(stock, scattered + int(stock.heap_share * sum(line.nbytes for line in stock.update)))
    parameters, rest = stock.always[0], _present(*stock.always[1:])
    update = Moment(
        "optimizer step", _present(parameters, *held, *rest, *inputs, *stock.update, *beside), is_update=True
    )
    if course is None:
        return (update,)
    steady = buckets or wish.accumulate > 1
    found = []
    for name, height in course.steady if steady else course.fresh:
        moving = dict(height.by_kind)
        if steady:
            on_its_way = Line("gradients on their way", moving.pop(GRADIENTS, 0), "made, and not yet in their place")
            gradients, in_heap = (*held, *_present(on_its_way)), height.in_heap + scattered
        else:
            formula = "made so far" if moving.get(GRADIENTS) else "none yet: backward makes them one by one"
            gradients, in_heap = (Line(GRADIENTS, moving.pop(GRADIENTS, 0), formula),), height.in_heap
        lines = [Line(kind, size, course.formula(kind)) for kind, size in moving.items()]
        lines += _beside(stock, in_heap)
        found.append(Moment(name, (parameters, *gradients, *rest, *inputs, *_present(*lines))))
    return (*found, update)


def largest_that(fits: Callable[[int], bool], limit: int = 2**24) -> int:
    """The largest batch that fits, by doubling and then halving the gap; 0 when not even one sample does."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high < limit and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _beside(stock: Stock, moving: int) -> tuple[Line, ...]:
    """What a process holds beside its tensors on the CPU; `moving` are bytes in the heap that come and go."""
    if stock.device != "cpu":
        return ()
    late = int(HEAP_HOLES * stock.heap_share * sum(line.late_bytes for line in stock.always))
    holes = late + int(HEAP_HOLES * (moving + stock.heap_share * stock.always[0].nbytes))
    return (
        Line("holes in malloc's heap", holes, f"about {HEAP_HOLES:.0%} of blocks below 32 MiB", late),
        Line("math libraries", LIBRARY_BYTES, "about"),
    )


def _present(*lines: Line) -> tuple[Line, ...]:
    return tuple(line for line in lines if line.nbytes)


def _outside(device: str, ranks: int) -> tuple[Line, ...]:
    if device != "cuda":
        return (Line("Python and torch", INTERPRETER_BYTES, "about; what a process has before the model is built"),)
    context = Line("CUDA context and kernels", CUDA_CONTEXT_BYTES, "about; differs by device and driver")
    if ranks == 1:
        return (context,)
    return (context, Line("NCCL", NCCL_BYTES, "about; one communicator"))


def _traffic(stock: Stock, wish: Wish, ranks: int) -> Traffic:
    def share(nbytes: int) -> int:
        return 2 * (ranks - 1) * nbytes // ranks

    return Traffic(
        share(stock.gradients.nbytes), share(stock.last_bucket_bytes), wish.link_bytes_per_s, wish.backward_s
    )


def update_lines(way: str, dtype: str, optimizer: str, group: int, largest: int, count: int) -> tuple[Line, ...]:
    """What the optimizer's step needs for a moment, by the way it updates parameters.

    `group` and `largest` are the elements of the largest group of parameters and of the largest parameter.
    """
    precision, cost = precision_of(dtype), optimizer_of(optimizer)
    master = Line("gradients in float32", 4 * count if precision.master else 0, "for the master copy")
    if way == "fused":
        copies, elements, words = 0, 0, "fused: none"
    elif way == "foreach":
        copies, elements, words = cost.foreach_copies, group, "foreach, all parameters of a group at once"
    else:
        copies, elements, words = cost.loop_copies, largest, "one parameter after another, the largest"
    formula = f"{copies} × {times(precision.state, elements)}: {words}"
    return master, Line("copies of the optimizer", copies * precision.state * elements, formula)


def times(size: int, count: int) -> str:
    """A product that can be checked."""
    return f"{size} × {count:,}"


def state_lines(names: Sequence[str], size: int, count: int) -> tuple[Line, ...]:
    return tuple(Line(name, size * count, times(size, count), late_bytes=size * count) for name in names)
