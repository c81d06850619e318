"""The plan of a transformer from its numbers alone. Needs no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.memory_plan.assemble import (
    BUCKET_BYTES,
    Course,
    Stock,
    Wish,
    rank_plans,
    state_lines,
    times,
    update_lines,
)
from paceline.memory_plan.numbers import require_count, require_positive, show_count
from paceline.memory_plan.states import PlanError, Precision, convention, optimizer_of, precision_of, update_way
from paceline.memory_plan.timeline import ACTIVATIONS, CASTS, GRADIENTS, HEAP_BLOCK_BYTES, LOGITS, TEMPORARIES, Height
from paceline.memory_plan.value import Line, MemoryPlan

DEVICES = ("cpu", "cuda")
WIDEST = 32768  # that is guessed
USUAL_ASPECT = 64  # width per layer, as in the smallest GPT-2
MIB = 2**20
CUBLAS_BYTES = 64 * MIB  # forward and backward run on two threads, each with a handle and a workspace of its own


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder: pre-norm blocks of attention (no T×T matrix is kept) and a perceptron four times as wide."""

    params: int
    layers: int
    width: int
    heads: int
    seq: int
    vocab: int
    tied: bool = True  # one matrix for the embedding and the head
    checkpointing: bool = False

    @property
    def block_weights(self) -> int:
        return self.layers * 12 * self.width**2

    @property
    def table(self) -> int:
        """Elements of the embedding, which is the largest parameter as a rule."""
        return self.vocab * self.width

    @property
    def largest(self) -> int:
        return max(self.table, 4 * self.width**2)


def plan_params(
    params: float,
    batch: int = 1,
    seq: int = 1024,
    vocab: int = 50304,
    *,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    tied: bool = True,
    checkpointing: bool = False,
    optimizer: str = "adamw",
    dtype: str = "float32",
    ranks: int | Sequence[int] = 1,
    accumulate: int = 1,
    lanes: int | None = None,
    foreach: bool | None = None,
    fused: bool | None = None,
    device: str = "cuda",
    device_bytes: int | None = None,
    link_gbit: float | None = None,
    tflops: float | None = None,
    backward_s: float | None = None,
) -> MemoryPlan:
    """Plan a transformer that is known by its numbers only.

    `layers`, `width` and `heads` are guessed from `params` where they are not given, and the plan says so. `batch` is
    that of one micro of one rank, and `lanes` as DistributedDataParallel was told. `link_gbit` is the speed of a rank's
    link in Gbit/s; `tflops` is what a rank really computes per second, or `backward_s` how long its backward takes:
    with both, the plan tells how much of the communication stays exposed.
    """
    if device not in DEVICES:
        raise PlanError(f"device={device!r}: expected one of {', '.join(DEVICES)}")
    batch = require_count("batch", batch)
    precision, cost = precision_of(dtype), optimizer_of(optimizer)
    shape, notes = _shape(params, seq, vocab, layers, width, heads, tied, checkpointing)
    way = update_way(optimizer, device, foreach, fused)
    if backward_s is None and require_positive("tflops", tflops) is not None:
        assert tflops is not None
        backward_s = backward_flops(shape, batch) / (tflops * 1e12)
    wish = make_wish(ranks, accumulate, device_bytes, link_gbit, backward_s, lanes)
    count = shape.params
    always = (
        Line("parameters", precision.parameter * count, times(precision.parameter, count)),
        Line("master", precision.master * count, times(precision.master, count)),
        *state_lines(cost.states, precision.state, count),
        Line("cuBLAS workspaces", CUBLAS_BYTES if device == "cuda" else 0, "2 × 32 MiB"),
    )
    update = update_lines(way, dtype, optimizer, count, shape.largest, count)
    gradients = Line(GRADIENTS, precision.gradient * count, times(precision.gradient, count))
    padding = Line("gradient buckets", 0, "0: gradients are views of their buckets")
    last = min(BUCKET_BYTES, gradients.nbytes)
    stock = Stock(always, gradients, padding, update, last, device, _heap_share(shape, precision))
    plans = rank_plans(stock, lambda wanted: _course(shape, precision, wanted or batch), wish)
    subject = (
        f"transformer of {show_count(count)} parameters ({shape.layers} layers, width {shape.width}), "
        f"batch {batch} × {seq} tokens, {dtype}, {optimizer} ({way}), {device}"
    )
    words = convention(dtype, optimizer)
    return MemoryPlan(subject, words, count, batch, device, plans, wish.device_bytes, tuple(notes))


def _course(shape: Transformer, precision: Precision, batch: int) -> Course:
    tokens, width = batch * shape.seq, shape.width
    act, res = precision.activation, precision.residual
    inputs = Line("batch", 2 * 8 * tokens, times(16, tokens))
    # Inputs of both norms; inputs of the four matrix products, q, k, v and the input of the activation function.
    per_block = (2 * res + 14 * act) * tokens * width + 4 * tokens * (shape.heads + 4)
    kept = res * tokens * width if shape.checkpointing else per_block
    around = (res + act) * tokens * width
    activations = shape.layers * kept + around
    logits = 12 * tokens * shape.vocab
    all_casts = 2 * (shape.block_weights + shape.table) if precision.autocast else 0
    casts = 2 * shape.table if all_casts and shape.checkpointing else all_casts
    again = per_block if shape.checkpointing else 0
    # Gradients before and after the activation function, and of the residual stream.
    temporaries = (4 * act + 2 * res) * tokens * width + again + 4 * width**2 * precision.gradient
    head = precision.gradient * shape.table
    twice = head if shape.tied else 0

    heap_share = _heap_share(shape, precision)

    def height(**parts: int) -> Height:
        in_heap = parts.get("activations", 0) if 4 * act * tokens * width < HEAP_BLOCK_BYTES else 0
        in_heap += parts.get("logits", 0) if 4 * tokens * shape.vocab < HEAP_BLOCK_BYTES else 0
        in_heap += int(heap_share * sum(parts.get(name, 0) for name in ("gradients", "casts")))
        return Height(True, tuple((NAMES[name], size) for name, size in parts.items() if size), in_heap)

    gradients = precision.gradient * shape.params
    first_block = precision.gradient * 12 * width**2
    fresh: tuple[tuple[str, Height], ...] = (
        ("start of backward", height(activations=activations, casts=casts, logits=logits)),
        (
            "backward of the last block",
            height(activations=activations, casts=casts, gradients=head, temporaries=temporaries),
        ),
        (
            "backward of the first block",
            height(activations=kept, gradients=gradients - first_block, temporaries=temporaries),
        ),
        ("end of backward", height(gradients=gradients, temporaries=twice + 2 * res * tokens * width)),
    )
    steady: tuple[tuple[str, Height], ...] = (
        fresh[0],
        (fresh[1][0], height(activations=activations, casts=casts, temporaries=head + temporaries)),
        ("end of backward", height(temporaries=head + twice + 2 * res * tokens * width)),
    )
    if shape.checkpointing and precision.autocast:
        # Autocast's copies of weights live until forward is over; backward makes those of one block again.
        forward = height(activations=activations, casts=all_casts, logits=10 * tokens * shape.vocab)
        fresh, steady = (("end of forward", forward), *fresh), (("end of forward", forward), *steady)
    return Course(fresh, steady, _formulas(shape, precision, batch), inputs)


NAMES = {
    "activations": ACTIVATIONS,
    "casts": CASTS,
    "logits": LOGITS,
    "temporaries": TEMPORARIES,
    "gradients": GRADIENTS,
}


def _heap_share(shape: Transformer, precision: Precision) -> float:
    """The part of the parameters in blocks that malloc takes from its heap: all, or all but the tables."""
    if precision.parameter * shape.table < HEAP_BLOCK_BYTES:
        return 1.0
    tables = shape.table if shape.tied else 2 * shape.table
    return max(0.0, 1 - tables / shape.params)


def _formulas(shape: Transformer, precision: Precision, batch: int) -> tuple[tuple[str, str], ...]:
    act, res = precision.activation, precision.residual
    per_token = res if shape.checkpointing else 2 * res + 14 * act
    block = f"{per_token} bytes × {shape.layers} layers × {batch}·{shape.seq} tokens × {shape.width}"
    summed = "checkpointing keeps a block's input" if shape.checkpointing else f"2·{res} + 14·{act}"
    return (
        (NAMES["activations"], f"{block} ({summed}) and the ends"),
        (NAMES["logits"], f"3 × 4 bytes × {batch}·{shape.seq} tokens × {shape.vocab}: log-softmax and two gradients"),
        (NAMES["casts"], "2 × the weights of matrix products, until backward has used them"),
        (NAMES["temporaries"], "gradients on their way through one block"),
    )


def backward_flops(shape: Transformer, batch: int) -> int:
    """Two products per weight and token for each of two gradients, and those of causal attention."""
    tokens = batch * shape.seq
    again = 2 if shape.checkpointing else 0
    return (4 + again) * shape.params * tokens + (4 + again) * shape.layers * tokens * shape.seq * shape.width


def make_wish(
    ranks: int | Sequence[int],
    accumulate: int,
    device_bytes: int | None,
    link_gbit: float | None,
    backward_s: float | None,
    lanes: int | None = None,
) -> Wish:
    """What was asked for beside the model, checked."""
    speed = require_positive("link_gbit", link_gbit)
    return Wish(
        world_sizes(ranks),
        require_count("accumulate", accumulate),
        None if device_bytes is None else require_count("device_bytes", device_bytes),
        None if speed is None else speed * 1e9 / 8,
        require_positive("backward_s", backward_s),
        None if lanes is None else require_count("lanes", lanes),
    )


def world_sizes(ranks: int | Sequence[int]) -> tuple[int, ...]:
    """One size of the world, or several."""
    given = tuple(ranks) if isinstance(ranks, Sequence) else (ranks,)
    if not given:
        raise PlanError("ranks=(): expected one or more numbers of ranks")
    return tuple(require_count("ranks", item) for item in given)


def _shape(
    params: float,
    seq: int,
    vocab: int,
    layers: int | None,
    width: int | None,
    heads: int | None,
    tied: bool,
    checkpointing: bool,
) -> tuple[Transformer, list[str]]:
    count, seq, vocab = require_count("params", params), require_count("seq", seq), require_count("vocab", vocab)
    given = {"layers": layers, "width": width, "heads": heads}
    for name, value in given.items():
        if value is not None:
            require_count(name, value)
    guessed_layers, guessed_width = guess(count, seq, vocab, layers, width, tied, heads or 1)
    guessed_heads = heads or usual_heads(guessed_width)
    guesses = {"layers": guessed_layers, "width": guessed_width, "heads": guessed_heads}
    words = ", ".join(f"{name} {guesses[name]}" for name, value in given.items() if value is None)
    notes = [f"guessed from the number of parameters: {words}"] if words else []
    shape = Transformer(count, guessed_layers, guessed_width, guessed_heads, seq, vocab, tied, checkpointing)
    _refuse_impossible(shape)
    return shape, notes


def _refuse_impossible(shape: Transformer) -> None:
    if shape.width % shape.heads:
        raise PlanError(f"heads={shape.heads}: expected a number that divides width={shape.width}")
    tables = shape.table if shape.tied else 2 * shape.table
    sizes = f"vocab={shape.vocab} × width={shape.width}{'' if shape.tied else ', twice,'}"
    if shape.params <= tables:
        raise PlanError(f"params={shape.params}: expected more than the {tables:,} that {sizes} takes")
    # Blocks of another make have fewer weights than twelve squares of the width, but not half of them.
    whole = tables + shape.block_weights
    if whole > 2 * shape.params:
        blocks = f"layers={shape.layers} of width={shape.width}"
        raise PlanError(
            f"params={shape.params}: expected about the {whole:,} that {blocks} take with vocab={shape.vocab}"
        )


def usual_heads(width: int) -> int:
    """Heads about 64 wide that divide the width."""
    return max(heads for heads in range(1, max(1, width // 64) + 1) if width % heads == 0)


def guess(
    params: int,
    seq: int,
    vocab: int,
    layers: int | None = None,
    width: int | None = None,
    tied: bool = True,
    heads: int = 1,
) -> tuple[int, int]:
    """Layers and width of a decoder with about so many parameters, shaped as usual. Heads divide a guessed width."""
    widths = [width] if width else [size for size in range(64, WIDEST + 1, 64) if size % heads == 0]
    best: tuple[float, int, int] | None = None
    for candidate in widths:
        ends = (vocab * (1 if tied else 2) + seq) * candidate
        block = 12 * candidate**2 + 13 * candidate
        depth = layers or max(1, round((params - ends) / block))
        miss = abs(ends + depth * block - params) / params
        odd = abs(math.log(candidate / depth / USUAL_ASPECT))
        if best is None or 20 * miss + odd < best[0]:
            best = (20 * miss + odd, depth, candidate)
    if best is None:
        raise PlanError(
            f"heads={heads}: no width up to {WIDEST} is a multiple of it and of 64; expected width= as well"
        )
    return best[1], best[2]
