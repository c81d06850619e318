"""The arithmetic of a plan: what one rank holds at each moment of a step, and what it sends. Needs no torch.

A planner, `closed_form` or `of_model`, gives the numbers of a model and of a batch. Every line of a plan is made here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from paceline.memory_plan.numbers import show_bytes
from paceline.memory_plan.result import MemoryLine, MemoryPlan, RankPlan, StepMoment, Traffic
from paceline.memory_plan.setup import PLACEMENTS, TrainingSetup, bytes_per_parameter
from paceline.memory_plan.storages import GRADIENTS, Height

MIB = 2**20
CUBLAS_BYTES = 64 * MIB  # forward and backward run on two threads, each with a handle and a workspace of its own
# Not counted by torch's allocator and not the same everywhere; `fits` would be wrong without them, so they are named.
CUDA_CONTEXT_BYTES = 512 * MIB
NCCL_BYTES = 512 * MIB
INTERPRETER_BYTES = 384 * MIB
# On the CPU the process is larger than its tensors. With glibc the holes were 12 to 19 % of the blocks in its heap on
# GPTs of 5 to 163 million parameters, and on one of them up to 35 % in one run of ten: they vary from run to run.
HEAP_HOLES = 0.15
LIBRARY_BYTES = 8 * MIB
PIECE_BYTES = 16 * MIB  # of parameters that are gathered at a time after an update
MOST_RANKS = 1024  # that are tried when a model does not fit


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


def plan_ranks(
    model: ModelMemory, at_batch: BatchMemoryAt | None, batch: int | None, setup: TrainingSetup, notes: list[str]
) -> MemoryPlan:
    """The plan for every world size. Without `at_batch` nothing is known about activations."""
    current = None if at_batch is None or batch is None else at_batch(batch)
    plans = []
    for ranks in setup.ranks:
        outside = _outside(setup.device, ranks)
        largest = None
        if setup.device_memory is not None and at_batch is not None:
            room = setup.device_memory - _total(outside)

            def fits(batch: int, ranks: int = ranks, room: int = room, at: BatchMemoryAt = at_batch) -> bool:
                return max(moment.total for moment in _moments(model, at(batch), setup, ranks)) <= room

            largest = largest_that(fits)
        moments = _moments(model, current, setup, ranks)
        found = RankPlan(ranks, moments, outside, traffic_of(model, setup, ranks), largest)
        if setup.device_memory is not None and found.total_with_outside > setup.device_memory:
            found = replace(found, instead=_what_fits(model, current, setup, ranks))
        plans.append(found)
    how = f"{setup.dtype}, {setup.optimizer} ({setup.update_kind}), {setup.device}, {setup.placement}"
    subject = f"{model.name}, {how}"
    return MemoryPlan(
        subject, setup.convention, model.count, batch, setup.device, tuple(plans), setup.device_memory, tuple(notes)
    )


def _what_fits(model: ModelMemory, batch: BatchMemory | None, setup: TrainingSetup, ranks: int) -> tuple[str, ...]:
    """What would fit in the place of what was asked for: another placement, or more ranks."""
    assert setup.device_memory is not None

    def needs(placement: str, ranks: int) -> int | None:
        """Bytes, if they fit."""
        asked = replace(setup, placement=placement, ranks=(1,))
        if (setup.lanes is not None and setup.lanes < ranks) or not asked.deals_evenly(ranks):
            return None
        total = max(moment.total for moment in _moments(model, batch, asked, ranks)) + _total(
            _outside(setup.device, ranks)
        )
        return total if total <= (setup.device_memory or 0) else None

    found = []
    others = PLACEMENTS[PLACEMENTS.index(setup.placement) + 1 :] if ranks > 1 else ()
    here = next((name for name in others if needs(name, ranks)), None)
    if here is not None:
        found.append(f"{here} on {ranks} ranks ({show_bytes(needs(here, ranks) or 0)})")
    sharded = setup.placement if setup.placement != "ddp" else here or "zero3"
    worlds = (2**power for power in range(1, MOST_RANKS.bit_length()) if 2**power > ranks)
    if (more := next((world for world in worlds if needs(sharded, world)), None)) is not None:
        found.append(f"{sharded} on {more} ranks ({show_bytes(needs(sharded, more) or 0)})")
    return tuple(found)


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


def _moments(model: ModelMemory, batch: BatchMemory | None, setup: TrainingSetup, ranks: int) -> tuple[StepMoment, ...]:
    """The points at which memory may be highest: the start, some of forward and backward, and the update."""
    parameters = _parameters(model, setup, ranks)
    in_buckets = ranks > 1 or setup.lanes is not None
    gradients, states, update = (
        _gradients(model, setup, ranks),
        _states(model, setup, ranks),
        _update(model, setup, ranks),
    )
    always = _present(
        MemoryLine("buffers", model.buffer_bytes, "of the model"),
        MemoryLine("cuBLAS workspaces", model.workspace_bytes, "one for forward, one for backward"),
    )
    rest = states + always + ((batch.inputs,) if batch is not None else ())
    # Buckets are made once and lie apart; gradients that autograd makes come from malloc, again and again.
    scattered = 0 if in_buckets else model.heap_share * model.gradient_bytes
    lasting = model.heap_share * _total([parameters, *(line for line in states if line.name != "master")])
    beside = _beside(setup.device, lasting + scattered + model.heap_share * _total(update))
    last = [StepMoment("optimizer step", _present(parameters, *gradients, *rest, *update, *beside))]
    if pieces := _pieces(model, setup, ranks):
        beside = _beside(setup.device, lasting)
        last.append(StepMoment("gather after the update", _present(parameters, *gradients, *rest, *pieces, *beside)))
    if setup.shards("parameters", ranks):
        whole = MemoryLine("whole parameters", model.parameter_bytes, "of which the shards are taken")
        beside = _beside(setup.device, lasting + model.heap_share * model.parameter_bytes)
        last.append(StepMoment("wrapping the model", _present(parameters, whole, *always, *beside)))
    if batch is None:
        return tuple(last)
    steady = in_buckets or setup.accumulate > 1
    waiting, gathered = _waiting(model, setup, ranks), _gathered(model, setup, ranks)
    found = []
    for name, height in batch.steady if steady else batch.fresh:
        moving = dict(height.by_kind)
        made, in_heap = moving.pop(GRADIENTS, 0), lasting + height.in_heap + model.heap_share * _total(gathered)
        if steady:
            in_transit = MemoryLine("gradients in transit", made + waiting, "made, and not yet in their place")
            held, in_heap = (*gradients, *_present(in_transit)), in_heap + scattered + model.heap_share * waiting
        else:
            formula = "made so far" if made else "none yet: backward makes them one by one"
            held = (MemoryLine(GRADIENTS, made, formula),)
        followed = "followed with tensors that have no memory"
        kinds = [MemoryLine(kind, size, batch.formulas.get(kind, followed)) for kind, size in moving.items()]
        lines = (parameters, *gathered, *held, *rest, *_present(*kinds, *_beside(setup.device, in_heap)))
        found.append(StepMoment(name, lines))
    return (*found, *last)


def _parameters(model: ModelMemory, setup: TrainingSetup, ranks: int) -> MemoryLine:
    size, count, nbytes = setup.precision.parameter, model.count, model.parameter_bytes
    if setup.shards("parameters", ranks):
        count = model.owned(ranks) + model.count - model.trained
        nbytes = nbytes * count // model.count
    return MemoryLine("parameters", nbytes, _sum(size, count, nbytes))


def _gathered(model: ModelMemory, setup: TrainingSetup, ranks: int) -> tuple[MemoryLine, ...]:
    """What is gathered for a time where parameters are in shards."""
    if not setup.shards("parameters", ranks):
        return ()
    size = setup.precision.parameter
    ahead = size * model.unit + size * model.unit // ranks
    return _present(
        MemoryLine(
            "gathered parameters",
            size * (model.root + model.unit),
            f"{size} × ({model.root:,} + {model.unit:,}): the root, and the unit that runs",
        ),
        MemoryLine("unit fetched ahead", ahead, f"{size} × {model.unit:,} × (1 + 1/{ranks}): received, and sent"),
    )


def _gradients(model: ModelMemory, setup: TrainingSetup, ranks: int) -> tuple[MemoryLine, ...]:
    """Gradients where their memory is there all the time: buckets of several ranks or lanes, or shards of them."""
    if setup.shards(GRADIENTS, ranks):
        owned = model.owned(ranks)
        nbytes = model.gradient_bytes * owned // model.trained
        bucket = _bucket(model, setup, ranks)
        before = model.gradient_bytes if setup.accumulate > 1 else 0
        return _present(
            MemoryLine(GRADIENTS, nbytes, _sum(setup.precision.gradient, owned, nbytes)),
            MemoryLine("gradient buckets", 2 * bucket, f"2 × {bucket:,}: one fills while one is reduced"),
            MemoryLine("unreduced gradients", before, "of the microbatches before the last, whole"),
        )
    formula = _sum(setup.precision.gradient, model.trained, model.gradient_bytes)
    gradients = MemoryLine(GRADIENTS, model.gradient_bytes, formula)
    if ranks == 1 and setup.lanes is None:
        return (gradients,)
    copies = setup.lane_copies(ranks)
    sums = MemoryLine("sums of lanes", copies * model.gradient_bytes, f"{copies} × gradients: of the lanes before")
    padding = MemoryLine("gradient buckets", model.padding_bytes, "padding; gradients are views of their buckets")
    return (gradients, padding, *_present(sums))


def _bucket(model: ModelMemory, setup: TrainingSetup, ranks: int) -> int:
    """Bytes of the largest bucket: that of a unit where parameters are in shards."""
    by_unit = setup.precision.gradient * max(model.root, model.unit)
    return by_unit if setup.shards("parameters", ranks) else model.bucket_bytes


def _waiting(model: ModelMemory, setup: TrainingSetup, ranks: int) -> int:
    """Bytes of gradients that stay as backward has made them until all of their bucket are there: buckets that have
    memory in turn are filled at once."""
    if not setup.shards(GRADIENTS, ranks) or setup.accumulate > 1:
        return 0
    return setup.precision.gradient * model.unit if setup.shards("parameters", ranks) else model.bucket_bytes


def _states(model: ModelMemory, setup: TrainingSetup, ranks: int) -> tuple[MemoryLine, ...]:
    """Master copy and optimizer states."""
    count = _updated(model, setup, ranks)
    return tuple(
        MemoryLine(name, size * count, times(size, count))
        for name, size in bytes_per_parameter(setup.dtype, setup.optimizer).items()
        if name not in ("parameters", GRADIENTS)
    )


def _updated(model: ModelMemory, setup: TrainingSetup, ranks: int) -> int:
    """Elements that the optimizer of a rank updates."""
    return model.owned(ranks) if setup.shards("states", ranks) else model.trained


def _update(model: ModelMemory, setup: TrainingSetup, ranks: int) -> tuple[MemoryLine, ...]:
    """What the optimizer's step needs for a moment, by the way it updates parameters."""
    precision, cost, count = setup.precision, setup.optimizer_cost, _updated(model, setup, ranks)
    parts = ranks if setup.shards("states", ranks) else 1
    copies, elements, words = {
        "fused": (0, 0, "fused: none"),
        "foreach": (cost.foreach_copies, model.in_group // parts, "foreach, all parameters of a group at once"),
        "loop": (cost.loop_copies, model.largest // parts, "one parameter after another, the largest"),
    }[setup.update_kind]
    formula = f"{copies} × {times(precision.state, elements)}: {words}"
    return (
        MemoryLine(
            "gradients in float32", 4 * count if precision.master else 0, f"{times(4, count)}: for the master copy"
        ),
        MemoryLine("copies of the optimizer", copies * precision.state * elements, formula),
    )


def _pieces(model: ModelMemory, setup: TrainingSetup, ranks: int) -> tuple[MemoryLine, ...]:
    """Pieces of parameters on their way to other ranks after an update, two at a time."""
    if not setup.shards("states", ranks) or setup.shards("parameters", ranks):
        return ()
    piece = min(max(PIECE_BYTES, setup.precision.parameter * model.largest), model.parameter_bytes)
    sent = piece // ranks
    received = 0 if setup.device == "cpu" else piece  # in shared memory they are read where they are
    return (MemoryLine("pieces of parameters", 2 * (sent + received), f"2 × ({sent:,} sent + {received:,} received)"),)


def _beside(device: str, in_heap: float) -> tuple[MemoryLine, ...]:
    """What a process holds beside its tensors on the CPU, with so many bytes of tensors in malloc's heap."""
    if device != "cpu":
        return ()
    formula = f"about {HEAP_HOLES:.0%} of blocks below 32 MiB"
    holes = MemoryLine("holes in malloc's heap", int(HEAP_HOLES * in_heap), formula)
    return (holes, MemoryLine("math libraries", LIBRARY_BYTES, "about"))


def _outside(device: str, ranks: int) -> tuple[MemoryLine, ...]:
    if device != "cuda":
        words = "about; what a process has before the model is built"
        return (MemoryLine("Python and torch", INTERPRETER_BYTES, words),)
    context = MemoryLine("CUDA context and kernels", CUDA_CONTEXT_BYTES, "about; differs by device and driver")
    return (context,) if ranks == 1 else (context, MemoryLine("NCCL", NCCL_BYTES, "about; one communicator"))


def traffic_of(model: ModelMemory, setup: TrainingSetup, ranks: int) -> Traffic:
    """What a rank sends in one step. Gradients are summed and spread, or each sum goes to its owner alone. Parameters
    in shards are gathered for every forward and backward, others once, after the update."""
    speed = None if setup.link_gbit is None else setup.link_gbit * 1e9 / 8
    lanes = setup.lanes is not None
    spread = 2 if lanes or not setup.shards("states", ranks) else 1
    times_gathered = 0
    if setup.shards("parameters", ranks):
        times_gathered = 2 * setup.accumulate * (-(-(setup.lanes or ranks) // ranks))
    elif setup.shards("states", ranks):
        times_gathered = 1
    gathered = f" + {times_gathered} × parameters" if times_gathered else ""
    formula = f"({ranks} − 1)/{ranks} × ({spread} × gradients{gathered})"

    def sent(nbytes: int) -> int:
        return nbytes * (ranks - 1) // ranks

    gradients, parameters = spread * model.gradient_bytes, times_gathered * model.parameter_bytes
    in_forward = parameters // 2 if times_gathered > 1 else 0
    return Traffic(
        sent_bytes=sent(gradients + parameters),
        last_bucket_bytes=sent(spread * model.last_bucket_bytes),
        link_bytes_per_s=speed,
        backward_s=setup.backward_s,
        in_forward_bytes=sent(in_forward),
        alone_bytes=sent(parameters) if times_gathered == 1 else 0,
        formula=formula,
    )


def _total(lines: Iterable[MemoryLine]) -> int:
    return sum(line.nbytes for line in lines)


def _present(*lines: MemoryLine) -> tuple[MemoryLine, ...]:
    return tuple(line for line in lines if line.nbytes)


def times(size: int, count: int) -> str:
    """A product that can be checked."""
    return f"{size} × {count:,}"


def _sum(size: int, count: int, nbytes: int) -> str:
    return times(size, count) if size * count == nbytes else f"{count:,} elements of several dtypes"
