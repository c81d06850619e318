"""The plan of a transformer from its numbers alone. Needs no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.memory_plan.model_memory import MIB, BatchMemory, ModelMemory, times
from paceline.memory_plan.numbers import PlanError, parse_count, parse_positive, show_count
from paceline.memory_plan.rank_memory import CUBLAS_BYTES, plan_ranks
from paceline.memory_plan.result import MemoryLine, MemoryPlan
from paceline.memory_plan.setup import Precision, TrainingSetup, setting
from paceline.memory_plan.storages import (
    ACTIVATIONS,
    CASTS,
    GRADIENTS,
    HEAP_BLOCK_BYTES,
    LOGITS,
    TEMPORARIES,
    Height,
)

WIDEST = 32768  # that is guessed
USUAL_ASPECT = 64  # width per layer, as in the smallest GPT-2
BUCKET_BYTES = 25 * MIB


@dataclass(frozen=True, kw_only=True)
class PlanSettings(TrainingSetup):
    """One question about a transformer: `PlanSettings(params="1.3B", batch=8, device_memory="40GiB").plan()`.

    With `link_gbit` and either `tflops` or `backward_s` the plan says how much of the communication stays exposed.
    """

    params: int = setting("124M", "number of parameters: 124M, 1.3B, …", parse_count, group="Model", text=True)
    batch: int = setting(8, "samples of one microbatch of one rank", parse_count, group="Model")
    seq: int = setting(1024, "tokens of one sample", parse_count, group="Model")
    vocab: int = setting(50304, "size of the vocabulary", parse_count, group="Model")
    layers: int | None = setting(None, "blocks; guessed from --params if not given", parse_count, group="Model")
    width: int | None = setting(None, "width of the residual stream; guessed if not given", parse_count, group="Model")
    heads: int | None = setting(None, "attention heads; guessed if not given", parse_count, group="Model")
    untied: bool = setting(
        False, "the output layer has a matrix of its own", lambda _, value: bool(value), group="Model"
    )
    checkpointing: bool = setting(False, "recompute blocks in backward", lambda _, value: bool(value), group="Model")
    tflops: float | None = setting(
        None, "sustained TFLOP/s of a rank, to estimate the time of its backward", parse_positive, group="Machine"
    )

    def plan(self) -> MemoryPlan:
        """The answer."""
        shape, notes = _shape_of(self)
        setup: TrainingSetup = self
        if self.backward_s is None and self.tflops is not None:
            setup = replace(self, backward_s=backward_flops(shape, self.batch) / (self.tflops * 1e12))
        size = f"{show_count(shape.params)} parameters ({shape.layers} layers, width {shape.width})"
        model = _model_memory(
            shape, self.precision, self.device, f"transformer of {size}, batch {self.batch} × {self.seq} tokens"
        )
        return plan_ranks(model, lambda batch: _batch_memory(shape, self.precision, batch), self.batch, setup, notes)


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
        """Elements of the embedding, which is usually the largest parameter."""
        return self.vocab * self.width

    @property
    def tables(self) -> int:
        """Elements of the embedding and the head."""
        return self.table if self.tied else 2 * self.table

    def heap_share(self, precision: Precision) -> float:
        """The part of the parameters in blocks that malloc takes from its heap: all, or all but the tables."""
        return 1.0 if precision.parameter * self.table < HEAP_BLOCK_BYTES else max(0.0, 1 - self.tables / self.params)


def _model_memory(shape: Transformer, precision: Precision, device: str, name: str) -> ModelMemory:
    count = shape.params
    gradients = precision.gradient * count
    bucket = max(BUCKET_BYTES, precision.gradient * shape.table)
    return ModelMemory(
        name=name,
        count=count,
        trained=count,
        parameter_bytes=precision.parameter * count,
        gradient_bytes=gradients,
        workspace_bytes=CUBLAS_BYTES if device == "cuda" else 0,
        in_group=count,
        largest=max(shape.table, 4 * shape.width**2),
        last_bucket_bytes=min(BUCKET_BYTES, gradients),
        bucket_bytes=min(bucket, gradients),
        turns_bytes=min(2 * bucket, gradients),
        root=max(0, count - shape.block_weights),
        unit=min(12 * shape.width**2, count),
        owned=lambda ranks: -(-count // ranks),
        heap_share=shape.heap_share(precision),
    )


def _batch_memory(shape: Transformer, precision: Precision, batch: int) -> BatchMemory:
    tokens, width = batch * shape.seq, shape.width
    act, res = precision.activation, precision.residual
    # Inputs of both norms; inputs of the four matrix products, q, k, v and the input of the activation function.
    per_block = (2 * res + 14 * act) * tokens * width + 4 * tokens * (shape.heads + 4)
    kept = res * tokens * width if shape.checkpointing else per_block
    activations = shape.layers * kept + (res + act) * tokens * width
    logits = 12 * tokens * shape.vocab
    all_casts = 2 * (shape.block_weights + shape.table) if precision.autocast else 0
    casts = 2 * shape.table if all_casts and shape.checkpointing else all_casts
    again = per_block if shape.checkpointing else 0
    # Gradients before and after the activation function, and of the residual stream.
    temporaries = (4 * act + 2 * res) * tokens * width + again + 4 * width**2 * precision.gradient
    head = precision.gradient * shape.table
    twice = head if shape.tied else 0
    stream = 2 * res * tokens * width
    gradients = precision.gradient * shape.params
    but_first_block = gradients - precision.gradient * 12 * width**2

    def height(parts: Mapping[str, int]) -> Height:
        in_heap = parts.get(ACTIVATIONS, 0) if 4 * act * tokens * width < HEAP_BLOCK_BYTES else 0
        in_heap += parts.get(LOGITS, 0) if 4 * tokens * shape.vocab < HEAP_BLOCK_BYTES else 0
        in_heap += int(shape.heap_share(precision) * sum(parts.get(name, 0) for name in (GRADIENTS, CASTS)))
        return Height(True, tuple((name, size) for name, size in parts.items() if size), in_heap)

    first = ("start of backward", height({ACTIVATIONS: activations, CASTS: casts, LOGITS: logits}))
    forward = {ACTIVATIONS: activations, CASTS: casts}
    last_block, first_block, end = "backward of the last block", "backward of the first block", "end of backward"
    fresh = [
        first,
        (last_block, height(forward | {GRADIENTS: head, TEMPORARIES: temporaries})),
        (first_block, height({ACTIVATIONS: kept, GRADIENTS: but_first_block, TEMPORARIES: temporaries})),
        (end, height({GRADIENTS: gradients, TEMPORARIES: twice + stream})),
    ]
    steady = [
        first,
        (last_block, height(forward | {TEMPORARIES: head + temporaries})),
        (end, height({TEMPORARIES: head + twice + stream})),
    ]
    if shape.checkpointing and precision.autocast:
        # Autocast's copies of weights live until forward is over; backward makes those of one block again.
        parts = {ACTIVATIONS: activations, CASTS: all_casts, LOGITS: 10 * tokens * shape.vocab}
        fresh, steady = ([("end of forward", height(parts)), *heights] for heights in (fresh, steady))
    inputs = MemoryLine("batch", 2 * 8 * tokens, times(16, tokens))
    return BatchMemory(tuple(fresh), tuple(steady), inputs, _formulas(shape, precision, batch))


def _formulas(shape: Transformer, precision: Precision, batch: int) -> dict[str, str]:
    act, res = precision.activation, precision.residual
    per_token = res if shape.checkpointing else 2 * res + 14 * act
    block = f"{per_token} bytes × {shape.layers} layers × {batch}·{shape.seq} tokens × {shape.width}"
    summed = "checkpointing keeps a block's input" if shape.checkpointing else f"2·{res} + 14·{act}"
    return {
        ACTIVATIONS: f"{block} ({summed}), plus both ends",
        LOGITS: f"3 × 4 bytes × {batch}·{shape.seq} tokens × {shape.vocab}: log-softmax and two gradients",
        CASTS: "2 × the weights of matrix products, until backward has used them",
        TEMPORARIES: "gradients on their way through one block",
    }


def backward_flops(shape: Transformer, batch: int) -> int:
    """Two products per weight and token for each of two gradients, and those of causal attention."""
    tokens = batch * shape.seq
    again = 2 if shape.checkpointing else 0
    return (4 + again) * shape.params * tokens + (4 + again) * shape.layers * tokens * shape.seq * shape.width


def _shape_of(asked: PlanSettings) -> tuple[Transformer, list[str]]:
    """The transformer that is asked about, and a note about what of it is guessed."""
    layers, width = guess(
        asked.params, asked.seq, asked.vocab, asked.layers, asked.width, not asked.untied, asked.heads or 1
    )
    found = {"layers": layers, "width": width, "heads": asked.heads or usual_heads(width)}
    words = ", ".join(f"{name} {value}" for name, value in found.items() if getattr(asked, name) is None)
    shape = Transformer(
        asked.params,
        **found,
        seq=asked.seq,
        vocab=asked.vocab,
        tied=not asked.untied,
        checkpointing=asked.checkpointing,
    )
    _refuse_impossible(shape)
    return shape, [f"guessed from the number of parameters: {words}"] if words else []


def _refuse_impossible(shape: Transformer) -> None:
    if shape.width % shape.heads:
        raise PlanError(f"heads={shape.heads}: expected a number that divides width={shape.width}")
    sizes = f"vocab={shape.vocab} × width={shape.width}{'' if shape.tied else ', twice,'}"
    if shape.params <= shape.tables:
        raise PlanError(f"params={shape.params}: expected more than the {shape.tables:,} that {sizes} takes")
    # Blocks of another design have fewer weights than twelve squares of the width, but not half of them.
    whole = shape.tables + shape.block_weights
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
