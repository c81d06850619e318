"""What ranks exchange in a step, and the memory in which they send and receive it. Needs no torch.

Ranks that share memory read where the others have written. Over gloo and NCCL what is sent and what is received lie
beside what it is about: over gloo a copy of a bucket is sent, and one of parameters to each rank.
"""

from collections.abc import Iterator

from paceline.memory_plan.model_memory import MIB, ModelMemory, present
from paceline.memory_plan.result import MemoryLine, Traffic
from paceline.memory_plan.setup import TrainingSetup
from paceline.memory_plan.storages import GRADIENTS

PIECE_BYTES = {"cpu": 4 * MIB, "cuda": 16 * MIB}  # of parameters that are gathered at a time after an update
PIECES_AT_A_TIME = 4  # two that are gathered, and two that other ranks have yet to read
SPARE_BYTES = 16 * MIB  # of memory that gathers over gloo keep for the next one
SCATTER_BYTES = 8 * MIB  # of gradients that are exchanged at a time where shards are over some of the ranks, over gloo


def copies_per_gradient(setup: TrainingSetup, ranks: int) -> float:
    """Bytes beside a bucket while it is reduced, for each of its own: of what is sent and received in other memory, or
    in another type."""
    own, wire = setup.precision.gradient, setup.wire_bytes
    if ranks == 1 or setup.lanes is not None:
        return 0.0
    if not setup.shards("states", ranks):
        return 0.0 if wire == own else wire / own
    if setup.shares_memory:  # shards are reduced where they are, half precision in float32
        return wire / own if wire < own else 0.0
    if setup.device == "cpu":  # over gloo: a bucket is sent from a copy, and as much is received
        return 2 * min(wire, own) / own
    return min(wire, own) / own + wire / own / setup.parts(ranks)


def gathered(model: ModelMemory, setup: TrainingSetup, ranks: int) -> tuple[MemoryLine, ...]:
    """What is gathered for a time where parameters are in shards."""
    if not setup.shards("parameters", ranks):
        return ()
    size = setup.precision.parameter
    ahead, words = _gathering(size * model.unit, setup, ranks)
    formula = f"{size} × ({model.root:,} + 2 × {model.unit:,}): the root, and two units where one follows the other"
    return present(
        MemoryLine("gathered parameters", size * (model.root + 2 * model.unit), formula),
        MemoryLine("unit fetched ahead", ahead, f"{size} × {model.unit:,}{words}"),
    )


def _gathering(nbytes: int, setup: TrainingSetup, ranks: int) -> tuple[int, str]:
    """What so many bytes of parameters take while they are gathered, before they are in their place."""
    if setup.shares_memory:  # they are read where they are, and written in their place
        return nbytes, ""
    if setup.device == "cpu":
        return 2 * nbytes, " × 2: received, and a copy sent to each rank"
    parts = setup.parts(ranks)
    return nbytes + nbytes // parts, f" × (1 + 1/{parts}): received, and sent"


def moments_of_exchange(
    model: ModelMemory, setup: TrainingSetup, ranks: int
) -> Iterator[tuple[str, tuple[MemoryLine, ...]]]:
    """Moments at which there is little beside what ranks exchange, which then needs memory of its own."""
    copies, precision = copies_per_gradient(setup, ranks), setup.precision
    in_units = setup.shards("parameters", ranks)
    if setup.shares_memory or not setup.shards("states", ranks):
        return
    if copies and (in_units or not setup.shards(GRADIENTS, ranks)):
        ends = model.root + model.unit if in_units else 0
        nbytes = precision.gradient * ends if in_units else model.gradient_bytes
        if setup.device == "cpu" and setup.parts(ranks) < ranks:
            nbytes = min(nbytes, SCATTER_BYTES)
        words = f"{copies:.3g} × {nbytes:,}: sent and received"
        lines = (
            MemoryLine("gathered parameters", precision.parameter * ends, "the root and a unit"),
            MemoryLine("copies of buckets under way", int(copies * nbytes), words),
        )
        yield "last buckets under way", present(*lines)
    if in_units:
        root = precision.parameter * model.root
        ahead, words = _gathering(root, setup, ranks)
        yield (
            "gather of the root",
            present(
                MemoryLine("gathered parameters", root, f"{precision.parameter} × {model.root:,}: the root"),
                MemoryLine("root on its way", ahead, f"{root:,}{words}"),
            ),
        )


def staging(model: ModelMemory, setup: TrainingSetup, ranks: int) -> tuple[MemoryLine, ...]:
    """Memory for parameters on their way to other ranks that is kept: shared by the ranks of a host, or sent from."""
    if setup.device != "cpu" or not setup.shards("states", ranks):
        return ()
    if not setup.shares_memory:
        kept = 0 if setup.shards("parameters", ranks) else min(SPARE_BYTES, model.parameter_bytes)
        return present(MemoryLine("kept for gathers", kept, "copies that were sent, for the next ones"))
    size, parts = setup.precision.parameter, setup.parts(ranks)
    if setup.shards("parameters", ranks):
        nbytes, words = size * (model.root + 2 * model.unit), "the root and two units"
    else:
        nbytes = min(_piece(model, setup) + (PIECES_AT_A_TIME - 1) * PIECE_BYTES[setup.device], model.parameter_bytes)
        words = f"{PIECES_AT_A_TIME} pieces"
    return (MemoryLine("staging in shared memory", nbytes // parts, f"{nbytes:,} / {parts}: {words}"),)


def on_their_way(model: ModelMemory, setup: TrainingSetup, ranks: int) -> tuple[MemoryLine, ...]:
    """Parameters on their way to other ranks after an update: over gloo all of them at once, on a device two pieces at
    a time. In shared memory they are read where they are: see `staging`."""
    if setup.shares_memory or not setup.shards("states", ranks) or setup.shards("parameters", ranks):
        return ()
    if setup.device == "cpu":
        nbytes, words = _gathering(model.parameter_bytes, setup, ranks)
        return (MemoryLine("parameters on their way", nbytes, f"{model.parameter_bytes:,}{words}"),)
    piece = _piece(model, setup)
    sent = piece // setup.parts(ranks)
    return (MemoryLine("pieces of parameters", 2 * (sent + piece), f"2 × ({sent:,} sent + {piece:,} received)"),)


def _piece(model: ModelMemory, setup: TrainingSetup) -> int:
    """Bytes of the largest one."""
    return min(max(PIECE_BYTES[setup.device], setup.precision.parameter * model.largest), model.parameter_bytes)


def traffic_of(model: ModelMemory, setup: TrainingSetup, ranks: int) -> Traffic:
    """What a rank sends in one step. Gradients are summed and spread, or each sum goes to its owner alone, and from
    there to those who own the same. Parameters in shards are gathered for every forward and backward, others once,
    under the forward that follows the update."""
    speed = None if setup.link_gbit is None else setup.link_gbit * 1e9 / 8
    scattered = setup.shards("states", ranks) and setup.lanes is None
    parts = setup.parts(ranks) if setup.shards("states", ranks) else 1
    times_gathered = 0
    if setup.shards("parameters", ranks):
        times_gathered = 2 * setup.accumulate * (-(-(setup.lanes or ranks) // ranks))
    elif setup.shards("states", ranks):
        times_gathered = 1
    own, wire = setup.precision.gradient, setup.wire_bytes
    summed = model.gradient_bytes * wire // own
    twins = ranks // parts if scattered else ranks
    spread = 2 * summed * (twins - 1) // twins // (parts if scattered else 1)
    to_owners = model.gradient_bytes * min(own, wire) // own * (parts - 1) // parts if scattered else 0
    gathered = times_gathered * model.parameter_bytes * (parts - 1) // parts
    terms = [f"({twins} − 1)/{twins} × 2 × gradients" + (f"/{parts}" if scattered else "")] if twins > 1 else []
    if inside := (["gradients"] if scattered else []) + ([f"{times_gathered} × parameters"] if gathered else []):
        terms.append(f"({parts} − 1)/{parts} × ({' + '.join(inside)})")
    return Traffic(
        sent_bytes=spread + to_owners + gathered,
        last_bucket_bytes=(spread + to_owners) * model.last_bucket_bytes // max(1, model.gradient_bytes),
        link_bytes_per_s=speed,
        backward_s=setup.backward_s,
        in_forward_bytes=gathered // 2 if times_gathered > 1 else gathered,
        formula=" + ".join(terms),
    )
