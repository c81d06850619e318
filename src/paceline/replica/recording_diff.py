"""The first difference between two recordings of a script, and advice about it. Needs no torch."""

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

SAME, DIFFERENT = 0, 1
Line = dict[str, Any]  # as replica/recording.py writes it


def compare(first: Sequence[Line], second: Sequence[Line], script: str) -> tuple[int, list[str]]:
    """The exit status, and the lines of the report, for the recordings of two runs."""
    settings: dict[str, str] = next((line["settings"] for line in first if line["kind"] == "settings"), {})
    for ours, theirs in zip_longest(_computed(first), _computed(second)):
        if ours != theirs:
            first_step = next((line["step"] for line in first if "step" in line), 0)
            return DIFFERENT, [*_difference(ours, theirs, script, first_step), *_kernels(settings)]
    counts = Counter(line["kind"] for line in first)
    steps = len({(line["replica"], line["step"]) for line in first if "step" in line})
    lanes = next((line["lanes"] for line in first if line["kind"] == "replica"), None)
    where = f"the first {f'{steps} steps' if steps > 1 else 'step'}{f' of {lanes} lanes' if lanes else ''}"
    seen = f"{counts['output']} outputs of modules, {counts['gradient']} gradients, {counts['buffer after']} buffers"
    more = "only these were compared; --steps N compares more"
    return SAME, [f"{script} gives the same bits twice in {where}: {seen}", f"  {more}", *_kernels(settings)]


def _computed(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["kind"] not in ("complete", "settings")]


def _difference(ours: Line | None, theirs: Line | None, script: str, first_step: int) -> list[str]:
    if ours is None or theirs is None or {**ours, "digest": 0} != {**theirs, "digest": 0}:
        one, other = (_named(line) if line else "nothing more" for line in (ours, theirs))
        text = f"after equal bits the first run continued with {one}, the second with {other}"
        advice = "look for the order of a set or of files, a clock, or random numbers without a seed"
        return [
            f"two runs of {script} DIFFER in what they compute: {text}",
            f"  Which modules are called, or how often, changes from run to run: {advice}.",
        ]
    return [
        f"two runs of {script} DIFFER first in {_named(ours)}; everything before it is equal",
        f"  {_advice(ours, first_step)}",
    ]


def _named(line: Line) -> str:
    if line["kind"] == "replica":
        return f"a replica of {line['name']}"
    what = line["name"] or "the model itself"
    kind = f" ({line['kind_of']})" if line["kind_of"] else ""
    where = f"step {line['step']}" + ("" if line["lane"] is None else f", lane {line['lane']}")
    text = {
        "weights": f"the weights of {what} at the start",
        "buffer before": f"the buffer {what} at the start",
        "buffer after": f"the buffer {what} after forward",
        "input": f"input {what}{kind}",
        "output": f"the output of {what}{kind}",
        "gradient": f"the gradient of {what}",
    }[line["kind"]]
    return f"{text}, {where}"


def _advice(line: Line, first_step: int) -> str:
    kind, first = line["kind"], line["step"] == first_step
    if kind in ("weights", "buffer before") and first:
        return "The model starts from different values in each run: call torch.manual_seed(…) before it is built."
    if kind in ("weights", "buffer before"):
        return "All gradients were equal: the optimizer, or code between steps, draws random numbers without a seed."
    if kind == "input":
        return "The data differ between runs: seed the order of samples, and all that is random when one is read."
    if kind == "gradient":
        return "A kernel of backward is not deterministic: call torch.use_deterministic_algorithms(True)."
    seed = (
        "Lanes seed the generators of torch, Python and NumPy; this module draws from a generator of its own"
        if line["lane"] is not None
        else "This module draws random numbers without a seed (lanes would seed them, else torch.manual_seed)"
    )
    return f"{seed}, or runs a kernel that is not deterministic (torch.use_deterministic_algorithms(True))."


def _kernels(settings: dict[str, str]) -> list[str]:
    shown = ", ".join(f"{name}: {value}" for name, value in settings.items())
    return [f"kernels: {shown}"] if shown else []
