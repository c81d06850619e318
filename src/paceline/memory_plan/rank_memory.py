"""The arithmetic of a plan: what one rank holds at each moment of a step, and what it sends. Needs no torch.

A planner, `closed_form` or `of_model`, gives the numbers of a model and of a batch. Every line of a plan is made here.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from paceline.memory_plan.exchange import (
    SCATTER_BYTES,
    copies_per_gradient,
    gathered,
    moments_of_exchange,
    on_their_way,
    staging,
    traffic_of,
)
from paceline.memory_plan.model_memory import MIB, BatchMemory, BatchMemoryAt, ModelMemory, present, times, total
from paceline.memory_plan.numbers import show_bytes
from paceline.memory_plan.result import MemoryLine, MemoryPlan, RankPlan, StepMoment
from paceline.memory_plan.setup import PLACEMENTS, TrainingSetup, bytes_per_parameter
from paceline.memory_plan.storages import GRADIENTS, Height

CUBLAS_BYTES = 64 * MIB  # forward and backward run on two threads, each with a handle and a workspace of its own
# Not counted by torch's allocator and not the same everywhere; `fits` would be wrong without them, so they are named.
CUDA_CONTEXT_BYTES = 512 * MIB
NCCL_BYTES = 512 * MIB
INTERPRETER_BYTES = 384 * MIB
# On the CPU the process is larger than its tensors. With glibc the holes were 12 to 19 % of the blocks in its heap on
# GPTs of 5 to 163 million parameters, and on one of them up to 35 % in one run of ten: they vary from run to run. Two
# ranks, whose gradients are not in that heap, had 4 to 16 %.
HEAP_HOLES = 0.12
LIBRARY_BYTES = 8 * MIB
CHUNK_BYTES = 64 * MIB  # of parameters that rank 0 sends at a time when replicas start equal
MOST_RANKS = 1024  # that are tried when a model does not fit


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
            room = setup.device_memory - total(outside)

            def fits(batch: int, ranks: int = ranks, room: int = room, at: BatchMemoryAt = at_batch) -> bool:
                return max(moment.total for moment in _moments(model, at(batch), setup, ranks)) <= room

            largest = largest_that(fits)
        moments = _moments(model, current, setup, ranks)
        found = RankPlan(ranks, moments, outside, traffic_of(model, setup, ranks), largest)
        if setup.device_memory is not None and found.total_with_outside > setup.device_memory:
            found = replace(found, instead=_what_fits(model, current, setup, ranks))
        plans.append(found)
    over = "" if setup.shard is None else f" over {setup.shard} ranks"
    over += "" if setup.copies is None else f", {setup.copies} copies of each shard"
    over += "" if setup.transport == "auto" else f", transport {setup.transport}"
    notes = [*notes, *_twins_cost(model, current, setup, plans)]
    how = f"{setup.kind}, {setup.optimizer} ({setup.update_kind}), {setup.device}, {setup.placement}{over}"
    subject = f"{model.name}, {how}"
    return MemoryPlan(
        subject, setup.convention, model.count, batch, setup.device, tuple(plans), setup.device_memory, tuple(notes)
    )


def _twins_cost(
    model: ModelMemory, batch: BatchMemory | None, setup: TrainingSetup, plans: Iterable[RankPlan]
) -> Iterator[str]:
    """What it takes that several ranks hold each shard."""
    alone = replace(setup, shard=None, copies=None)
    for plan in plans:
        ranks, parts = plan.ranks, setup.parts(plan.ranks)
        if setup.placement != "ddp" and parts < ranks:
            more = plan.total - max(moment.total for moment in _moments(model, batch, alone, ranks))
            yield (
                f"{ranks} ranks: each shard is held by {ranks // parts} of them, which takes {show_bytes(more)} more "
                f"of every rank than shards over all"
            )


def _what_fits(model: ModelMemory, batch: BatchMemory | None, setup: TrainingSetup, ranks: int) -> tuple[str, ...]:
    """What would fit in the place of what was asked for: another placement, or more ranks."""
    assert setup.device_memory is not None

    def needs(placement: str, ranks: int) -> int | None:
        """Bytes, if they fit."""
        asked = replace(setup, placement=placement, ranks=(1,))
        too_few = setup.lanes is not None and setup.lanes < ranks
        if too_few or not asked.deals_evenly(ranks) or not asked.cuts_evenly(ranks):
            return None
        inside = max(moment.total for moment in _moments(model, batch, asked, ranks))
        needed = inside + total(_outside(setup.device, ranks))
        return needed if needed <= (setup.device_memory or 0) else None

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
    """The points at which memory may be highest: some of forward and backward, the update, and the start."""
    parameters, gradients = _parameters(model, setup, ranks), _gradients(model, setup, ranks)
    states, update = _states(model, setup, ranks), _update(model, setup, ranks)
    always = present(
        MemoryLine("buffers", model.buffer_bytes, "of the model"),
        MemoryLine("cuBLAS workspaces", model.workspace_bytes, "one for forward, one for backward"),
    )
    rest = (*states, *always, *staging(model, setup, ranks), *((batch.inputs,) if batch is not None else ()))
    # Buckets are made once and lie apart; gradients that autograd makes come from malloc, again and again.
    scattered = 0 if _in_buckets(setup, ranks) else model.heap_share * model.gradient_bytes
    lasting = model.heap_share * total([parameters, *(line for line in states if line.name != "master")])
    beside = _beside(setup.device, lasting + scattered + model.heap_share * total(update))
    last = [StepMoment("optimizer step", present(parameters, *gradients, *rest, *update, *beside))]
    if pieces := on_their_way(model, setup, ranks):
        beside = _beside(setup.device, lasting + model.heap_share * total(pieces))
        last.append(StepMoment("gather after the update", present(parameters, *gradients, *rest, *pieces, *beside)))
    for name, exchanged in moments_of_exchange(model, setup, ranks):
        beside = _beside(setup.device, lasting + scattered + model.heap_share * total(exchanged))
        last.append(StepMoment(name, present(parameters, *gradients, *rest, *exchanged, *beside)))
    if wrapping := _wrapping(model, setup, ranks):
        beside = _beside(setup.device, model.heap_share * model.parameter_bytes)
        last.append(StepMoment("wrapping the model", present(*wrapping, *always, *beside)))
    if batch is None:
        return tuple(last)
    found = []
    for name, height, reduced in _heights(batch, setup, ranks):
        moving = dict(height.by_kind)
        made = moving.pop(GRADIENTS, 0)
        passing = _passing(model, setup, ranks, made, reduced=reduced)
        in_heap = lasting + height.in_heap + model.heap_share * total(passing)
        held = passing
        if reduced or _in_buckets(setup, ranks) or setup.accumulate > 1:
            held, in_heap = (*gradients, *passing), in_heap + scattered
        followed = "followed with tensors that have no memory"
        kinds = [MemoryLine(kind, size, batch.formulas.get(kind, followed)) for kind, size in moving.items()]
        lines = (parameters, *held, *rest, *present(*kinds, *_beside(setup.device, in_heap)))
        found.append(StepMoment(name, lines))
    return (*found, *last)


def _in_buckets(setup: TrainingSetup, ranks: int) -> bool:
    """Whether gradients have memory all the time."""
    return ranks > 1 or setup.lanes is not None


def _heights(batch: BatchMemory, setup: TrainingSetup, ranks: int) -> Iterator[tuple[str, Height, bool]]:
    """The highest points, and whether gradients that are made before one have copies that are still under way."""
    if not _in_buckets(setup, ranks) and setup.accumulate == 1:
        yield from ((name, height, False) for name, height in batch.fresh)
        return
    yield from ((name, height, False) for name, height in batch.steady)
    if copies_per_gradient(setup, ranks) and not setup.shards(GRADIENTS, ranks):
        yield from ((f"{name}, buckets under way", height, True) for name, height in batch.fresh)


def _passing(
    model: ModelMemory, setup: TrainingSetup, ranks: int, made: int, *, reduced: bool
) -> tuple[MemoryLine, ...]:
    """What there is for a time during backward, beside activations, with so many bytes of gradients made.

    `reduced`: they are in their buckets, which are all under way.
    """
    if not _in_buckets(setup, ranks) and setup.accumulate == 1:
        words = "made so far" if made else "none yet: backward makes them one by one"
        return (MemoryLine(GRADIENTS, made, words),)
    copies = copies_per_gradient(setup, ranks)
    words = "made, and not yet in their place"
    turn = 2 * (setup.precision.gradient * model.unit if setup.shards("parameters", ranks) else model.bucket_bytes)
    under_way = made if reduced else turn if setup.shards(GRADIENTS, ranks) else 0
    if setup.device == "cpu" and setup.parts(ranks) < ranks:
        under_way = min(under_way, SCATTER_BYTES)  # piece by piece
    return present(
        *gathered(model, setup, ranks),
        MemoryLine("gradients in transit", 0 if reduced else max(made, _waiting(model, setup, ranks)), words),
        MemoryLine(
            "copies of buckets under way", int(copies * under_way), f"{copies:.3g} × {under_way:,}: sent and received"
        ),
    )


def _parameters(model: ModelMemory, setup: TrainingSetup, ranks: int) -> MemoryLine:
    size, count, nbytes = setup.precision.parameter, model.count, model.parameter_bytes
    if setup.shards("parameters", ranks):
        count = model.owned(setup.parts(ranks)) + model.count - model.trained
        nbytes = nbytes * count // model.count
    return MemoryLine("parameters", nbytes, _sum(size, count, nbytes))


def _wrapping(model: ModelMemory, setup: TrainingSetup, ranks: int) -> tuple[MemoryLine, ...]:
    """What there is while ranks take the values of rank 0, and their shards of them."""
    in_shards = setup.shards("parameters", ranks)
    if ranks == 1 or (in_shards and setup.meta):
        return ()
    copies = 2 if setup.device == "cpu" else 1
    chunk = min(CHUNK_BYTES + setup.precision.parameter * model.largest, model.parameter_bytes)
    whole = MemoryLine("parameters", model.parameter_bytes, f"{model.count:,} elements, whole")
    shards = _parameters(model, setup, ranks).nbytes if in_shards else 0
    return present(
        whole,
        MemoryLine("shards of parameters", shards, "taken from them"),
        MemoryLine("values from rank 0", copies * chunk, f"{copies} × {chunk:,}"),
    )


def _gradients(model: ModelMemory, setup: TrainingSetup, ranks: int) -> tuple[MemoryLine, ...]:
    """Gradients where their memory is there all the time: buckets of several ranks or lanes, or shards of them."""
    if setup.shards(GRADIENTS, ranks):
        owned = model.owned(setup.parts(ranks))
        nbytes = model.gradient_bytes * owned // model.trained
        buckets = model.turns_bytes
        words = "the largest two in turn: one fills while one is reduced"
        if setup.shards("parameters", ranks):
            buckets = setup.precision.gradient * (model.root + model.unit)
            words = "of the root and of a unit, in turn: one fills while one is reduced"
        before = model.gradient_bytes if setup.accumulate > 1 else 0
        return present(
            MemoryLine(GRADIENTS, nbytes, _sum(setup.precision.gradient, owned, nbytes)),
            MemoryLine("gradient buckets", buckets, words),
            MemoryLine("unreduced gradients", before, "of the microbatches before the last, whole"),
        )
    formula = _sum(setup.precision.gradient, model.trained, model.gradient_bytes)
    gradients = MemoryLine(GRADIENTS, model.gradient_bytes, formula)
    if ranks == 1 and setup.lanes is None:
        return (gradients,)
    copies = setup.lane_copies(ranks)
    sums = MemoryLine("sums of lanes", copies * model.gradient_bytes, f"{copies} × gradients: of the lanes before")
    padding = MemoryLine("gradient buckets", model.padding_bytes, "padding; gradients are views of their buckets")
    return (gradients, padding, *present(sums))


def _waiting(model: ModelMemory, setup: TrainingSetup, ranks: int) -> int:
    """Bytes of gradients that stay as backward has made them until all of their bucket are there: buckets that have
    memory in turn are filled at once. With parameters in shards that is over when two units are there."""
    turns = setup.shards(GRADIENTS, ranks) and not setup.shards("parameters", ranks)
    return model.bucket_bytes if turns and setup.accumulate == 1 else 0


def _states(model: ModelMemory, setup: TrainingSetup, ranks: int) -> tuple[MemoryLine, ...]:
    """Master copy and optimizer states."""
    count = _updated(model, setup, ranks)
    return tuple(
        MemoryLine(name, size * count, times(size, count))
        for name, size in bytes_per_parameter(setup.kind, setup.optimizer).items()
        if name not in ("parameters", GRADIENTS)
    )


def _updated(model: ModelMemory, setup: TrainingSetup, ranks: int) -> int:
    """Elements that the optimizer of a rank updates."""
    return model.owned(setup.parts(ranks)) if setup.shards("states", ranks) else model.trained


def _update(model: ModelMemory, setup: TrainingSetup, ranks: int) -> tuple[MemoryLine, ...]:
    """What the optimizer's step needs for a moment, by the way it updates parameters."""
    precision, cost, count = setup.precision, setup.optimizer_cost, _updated(model, setup, ranks)
    parts = setup.parts(ranks) if setup.shards("states", ranks) else 1
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


def _sum(size: int, count: int, nbytes: int) -> str:
    return times(size, count) if size * count == nbytes else f"{count:,} elements of several dtypes"
