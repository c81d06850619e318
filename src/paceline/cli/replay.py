"""`paceline replay FILE`: runs the step of a failure capsule again, ranks in turn, and shows what went wrong."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.agree.capsule import UNKNOWN_ERROR, Capsule, read_capsule
from paceline.agree.finite import first_not_finite
from paceline.agree.word import readable, word_of
from paceline.bench.tables import NOTHING, Table, render
from paceline.cli.rerun import Seen, Subject, run_turn, subject_of, turns
from paceline.errors import CapsuleDamaged, UsageError
from paceline.kernels import differences, kernel_settings, use_float32_precision

REPRODUCED, NOT_REPRODUCED, UNUSABLE = 0, 1, 2
LAST = 5
HINT = (
    ". If the model is called otherwise in your loop, or has another loss: --loss module:function(model, micro), where "
    "micro is, in lanes, what model.lanes() yielded, and otherwise the tuple of forward's arguments"
)
AS_DEALT = "; the capsule holds the micros as dealt: changes made inside your loop are not in it"


def main(file: Path, model: str | None = None, loss: str | None = None, device: str | None = None) -> int:
    """Replay one capsule. 0: the failure came again; 1: it did not; 2: it cannot be run, so nobody can tell."""
    try:
        capsule = read_capsule(file)
        where = _device(capsule, device)
        notes = take_settings(capsule, where)
        subject = subject_of(capsule, model, loss, where)
        _say(*about(capsule), *notes)
        seen = [run_turn(subject, capsule, turn) for turn in turns(capsule)]
        if not seen:
            raise UsageError(f"the capsule has no batch{_omitted(capsule)}, so there is nothing to run")
    except OSError as error:
        return _refuse(f"{file} cannot be read: {error.strerror}")
    except (UsageError, CapsuleDamaged) as error:
        return _refuse(str(error))
    _say("", render(table(seen)), "")
    if (why := all_failed(capsule, seen)) is not None:
        _say(why)
        return UNUSABLE
    again, words = judge(capsule, seen, subject)
    _say(*words)
    return REPRODUCED if again else NOT_REPRODUCED


def _device(capsule: Capsule, asked: str | None) -> torch.device:
    if asked is not None and asked.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"--device {asked}: expected cpu or cuda")
    if asked is not None and asked.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {asked}: torch sees no CUDA device here")
    had_gpu = "gpu" in capsule.settings.get("kernels", {})
    return torch.device(asked or ("cuda" if had_gpu and torch.cuda.is_available() else "cpu"))


def take_settings(capsule: Capsule, device: torch.device) -> list[str]:
    """Set up kernels as they were then; what stays different, in words."""
    then = {name: str(value) for name, value in capsule.settings.get("kernels", {}).items()}
    if then.get("threads", "").isdecimal():
        torch.set_num_threads(max(1, int(then["threads"])))
    if then.get("deterministic algorithms") == "True":
        torch.use_deterministic_algorithms(True)
    use_float32_precision(then)
    if then.get("flush denormal") == "True":
        torch.set_flush_denormal(True)
    unlike = differences(then, kernel_settings(device)) if then else []
    return [f"not as it was then: {text} here" for text in unlike]


def about(capsule: Capsule) -> list[str]:
    """What the capsule tells."""
    ranks = f"rank{'s' * (len(capsule.ranks) > 1)} {', '.join(map(str, capsule.ranks)) or 'unknown'}"
    lanes = f", lanes {capsule.lanes[0]} to {capsule.lanes[-1]}" if capsule.lanes else ""
    lines = [
        f"{capsule.kind} in step {capsule.step}, at fault: {ranks} of {capsule.world_size}",
        f"  {capsule.error}",
        f"  with the state of rank {capsule.rank}{lanes}; {1 + len(capsule.others)} of {capsule.world_size} batches",
    ]
    if capsule.omitted:
        lines.append(f"  left out, or changed: {'; '.join(capsule.omitted)}")
    if capsule.collectives:
        lines.append(f"  the last it did: {'; '.join(capsule.collectives[-LAST:])}")
    return lines


def table(seen: Sequence[Seen]) -> Table:
    rows = []
    for one in seen:
        finite = NOTHING if one.error else "NO" if one.bad else "yes"
        numbers = [NOTHING if number is None else f"{number:.6g}" for number in (one.loss, one.norm)]
        micro = NOTHING if one.turn.number is None else f"micro {one.turn.number}"
        lane = micro if one.turn.lane is None else str(one.turn.lane)
        rows.append([str(one.turn.rank), lane, numbers[0], finite, numbers[1], one.error or one.bad or NOTHING])
    header = ("rank", "lane", "loss", "finite", "gradient norm", "first bad tensor")
    return Table("run again, one after another", header, rows)


# ---- did it come again?


def all_failed(capsule: Capsule, seen: Sequence[Seen]) -> str | None:
    """If every row raises something that was not raised then: nothing was run that could tell."""
    if not all(one.error for one in seen) or any(_is_that_crash(capsule, one) for one in seen):
        return None
    first = seen[0]
    return f"it cannot be told: nothing could be run, {_place(first)} raises {first.error}{HINT}"


def _is_that_crash(capsule: Capsule, one: Seen) -> bool:
    if capsule.kind != "crash" or not one.error:
        return False
    if capsule.error == UNKNOWN_ERROR:
        return one.in_backward
    return one.error.partition(":")[0] == capsule.error.partition(":")[0]


def judge(capsule: Capsule, seen: Sequence[Seen], subject: Subject) -> tuple[bool, list[str]]:
    """Whether the capsule's failure came again, and what to say of it."""
    if capsule.kind == "crash":
        return _judge_crash(capsule, seen)
    if capsule.kind == "not-finite":
        return _judge_not_finite(capsule, seen)
    return _judge_divergence(capsule, seen, subject)


def _judge_crash(capsule: Capsule, seen: Sequence[Seen]) -> tuple[bool, list[str]]:
    for one in seen:
        if _is_that_crash(capsule, one):
            return True, [f"reproduced: {_place(one)} raises {one.error}"]
    other = next((one for one in seen if one.error), None)
    what = f"{_place(other)} raises something else: {other.error}" if other else "nothing was raised"
    return False, [f"not reproduced: {what}{_as_dealt(capsule)}"]


def _judge_not_finite(capsule: Capsule, seen: Sequence[Seen]) -> tuple[bool, list[str]]:
    bad = [one for one in seen if one.bad and not one.error]
    if bad:
        return True, [f"reproduced: {_place(one)}: not finite, first in {one.bad}" for one in bad]
    total: dict[str, torch.Tensor] = {}
    for one in seen:
        for name, grad in one.grads.items():
            share = grad / len(seen)
            total[name] = total[name] + share if name in total else share
    found = first_not_finite(total.items())
    if found is not None:
        what = f"{found.name}, {found.how_many} × {found.kind}"
        return True, [f"reproduced: the gradients of all are finite, but their sum is not: {what}"]
    failed = next((one for one in seen if one.error), None)
    what = f"{_place(failed)} raises {failed.error}{HINT}" if failed else "all that was computed is finite"
    return False, [f"not reproduced: {what}{_as_dealt(capsule)}"]


def _judge_divergence(capsule: Capsule, seen: Sequence[Seen], subject: Subject) -> tuple[bool, list[str]]:
    """Ranks held different state. What they held is told by words; a step that differs by itself is how it comes."""
    again, said = False, []
    for name, words in dict(capsule.settings.get("words", {})).items():
        groups: dict[int, list[int]] = {}
        for rank, word in enumerate(words):
            groups.setdefault(word, []).append(rank)
        if len(groups) == 1:
            continue
        held = capsule.state.get(name)
        same = held is None or (readable(held) and word_of([held]) == words[capsule.rank])
        again |= same
        told = "; ".join(
            f"rank {', '.join(map(str, ranks))}: {word & (1 << 64) - 1:016x}" for word, ranks in groups.items()
        )
        said.append(
            f"{name}: {told}" + ("" if same else f"; the capsule's own differs from what rank {capsule.rank} told")
        )
    for one in seen:
        second = run_turn(subject, capsule, one.turn)
        name = next((name for name, grad in one.grads.items() if _word(grad) != _word(second.grads.get(name))), None)
        if name is not None:
            again = True
            said.append(f"{_place(one)} gives other bits when it is run again, first in the gradient of {name}")
    if again:
        return True, ["reproduced:", *(f"  {line}" for line in said)]
    said.append("every lane gives the same bits when it is run twice: this step does not make replicas drift")
    return False, ["not reproduced:", *(f"  {line}" for line in said)]


def _word(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else word_of([tensor.to_dense()])


def _place(one: Seen) -> str:
    which = "" if one.turn.number is None else f", micro {one.turn.number}"
    return f"rank {one.turn.rank}" + (which if one.turn.lane is None else f", lane {one.turn.lane}")


def _as_dealt(capsule: Capsule) -> str:
    return AS_DEALT if capsule.lanes else ""


def _omitted(capsule: Capsule) -> str:
    return f" ({'; '.join(capsule.omitted)})" if capsule.omitted else ""


def _refuse(text: str) -> int:
    sys.stderr.write(f"paceline replay: {text}\n")
    return UNUSABLE


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
