"""What is said about replicas that have drifted apart."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.agree.drift import Drift, Element, TensorDrift

MANY = 3


def describe(drift: "Drift", end: str = "") -> str:
    """The whole message of a drift; its last sentence is `end`, or else what to do."""
    if not drift.tensors:
        return (
            f"ranks told different words of their state at step {drift.step}, but all {drift.compared} tensors are "
            f"equal now: a word was computed wrongly or changed on its way. Go on, and if it comes again, test the "
            f"memory and the processor of the machines"
        )
    first = drift.tensors[0]
    sentences = [f"replicas have drifted apart at step {drift.step}: {_who(first)} in {first.name}"]
    if drift.element is not None:
        sentences.append(_element(drift.element, first))
    if len(drift.tensors) > 1:
        names = [tensor.name for tensor in drift.tensors[1 : 1 + MANY]]
        more = "" if len(drift.tensors) <= 1 + MANY else " and others"
        sentences.append(
            f"{len(drift.tensors)} of {drift.compared} tensors differ, also {', '.join(names)}{more}, "
            f"on {ranks_text(drift.ranks)}"
        )
    sentences.append(end or _what_to_do(drift))
    return ". ".join(sentences)


def no_majority(drift: "Drift", tensor: "TensorDrift") -> str:
    """Why healing is refused."""
    why = "two ranks cannot outvote each other" if drift.size == 2 else "no group of them is more than half"
    return (
        f"{tensor.name} cannot be healed at step {drift.step}: {_who(tensor)}, and {why}, so it is not known whose "
        f"values are right. Name the rank to take them from (trust=), or restart from a checkpoint"
    )


def unlike(described: Sequence[Sequence[Sequence[Any]]], step: int) -> tuple[list[int], str, str]:
    """For ranks that hold different tensors: the ranks, the tensor's name and the message."""
    groups: dict[str, list[int]] = {}
    for rank, pieces in enumerate(described):
        groups.setdefault(repr(pieces), []).append(rank)
    base, *others = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    ours, theirs = described[base[0]], described[others[0][0]]
    longest = max(len(ours), len(theirs))
    at = next(n for n in range(longest) if n >= len(ours) or n >= len(theirs) or ours[n] != theirs[n])
    here, there = (_signature(pieces[at]) if at < len(pieces) else "nothing" for pieces in (ours, theirs))
    name = str((ours[at] if at < len(ours) else theirs[at])[0])
    odd = sorted(rank for group in others for rank in group)
    settled = 2 * len(base) > len(described)
    message = (
        f"ranks hold different state at step {step}, so their values cannot be compared: where {ranks_text(base)} "
        f"{_have(base)} {here}, {ranks_text(others[0])} {_have(others[0])} {there}. Build the model and the optimizer "
        f"the same way, and load the same checkpoint, on every rank"
    )
    return (odd if settled else list(range(len(described)))), name, message


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def listed(ranks: Iterable[int]) -> str:
    """`0`, `0 and 1`, `0, 1 and 3`."""
    *most, last = map(str, ranks)
    return f"{', '.join(most)} and {last}" if most else last


def _who(tensor: "TensorDrift") -> str:
    if tensor.majority:
        verb = "differs" if len(tensor.odd) == 1 else "differ"
        apart = ", each in its own way," if len(tensor.groups) > 2 else ""
        return f"{ranks_text(tensor.odd)} {verb}{apart} from {ranks_text(tensor.majority)}"
    sizes = sum(map(len, tensor.groups))
    if sizes == 2:
        return "ranks 0 and 1 differ"
    if len(tensor.groups) == sizes:
        return f"all {sizes} ranks differ"
    return (
        f"ranks fall into {len(tensor.groups)} groups (" + "; ".join(map(ranks_text, tensor.groups)) + ") that differ"
    )


def _element(element: "Element", tensor: "TensorDrift") -> str:
    digits = 2 * element.dtype.itemsize
    told: dict[int, list[int]] = {}
    for rank in (rank for group in tensor.groups for rank in group):
        told.setdefault(element.bits[rank], []).append(rank)
    values = ", ".join(
        f"{element.values[ranks[0]]!r} (0x{bits:0{digits}x}) on {ranks_text(ranks)}"
        for bits, ranks in list(told.items())[: MANY + 1]
    )
    where = f"The first difference is element {list(element.index)}" if element.index else "Its value is"
    sentence = f"{where}{':' if element.index else ''} {values}"
    if len(told) == 2:
        first, second = told
        changed = first ^ second
        count = changed.bit_count()
        sentence += f"; bit {changed.bit_length() - 1} differs" if count == 1 else f"; {count} bits differ"
    return sentence


def what_was_done(drift: "Drift", trust: int | None) -> str:
    """For a drift that is healed."""
    whose = "the majority now" if drift.healable else f"rank {trust} now, as trust={trust} asks"
    return (
        f"All ranks have the values of {whose}, and go on; if it comes again on {ranks_text(drift.ranks)}, suspect "
        f"memory or processor there, or code that changes state on some ranks only"
    )


def _what_to_do(drift: "Drift") -> str:
    where = ranks_text(drift.ranks)
    if drift.healable:
        return (
            f"Heal {where} from the majority, or restart from a checkpoint; if it comes again there, suspect that "
            f"machine's memory or processor"
        )
    return (
        "There is no majority to say which is right: restart all ranks from a checkpoint, or name the rank to trust; "
        "if no memory is at fault, look for code that changes state on some ranks only"
    )


def _signature(piece: Sequence[Any]) -> str:
    name, shape, dtype, begin, end = piece
    return f"{name} {shape} of {dtype} (elements {begin} to {end})"
