"""What a row asks for, beside what was seen."""

from cases import Case
from conduct import Quiet, Seen

ELASTIC_START_S = 2.0  # beside the script's own start, until a lost rank is there again


def misses(case: Case, way: str, seen: Seen, quiet: Quiet | None) -> list[str]:
    """What a job did not do that the row asks for; nothing if the row holds."""
    found = []
    ends = case.live_ends if way == "elastic" and case.live_ends else (case.ends,)
    if seen.outcome not in ends:
        found.append(seen.outcome)
    elif case.equal and (quiet is None or set(seen.digests) != {quiet.digest}):
        found.append("another digest")
    if case.named:
        found += _within("named", seen.named_s, case.named_s)
    if case.ended_s is not None:
        found += _within("ended", seen.ended_s, case.ended_s)
    if case.out_s is not None:
        found += _within("out", seen.out_s, case.out_s)
    if case.steady and seen.redone:
        found.append(f"{seen.redone} steps made twice")
    if case.code is not None and way != "torch" and seen.first_code != case.code:
        found.append(f"exit status {seen.first_code}, expected {case.code}")
    if way == "elastic" and quiet is not None:
        found += _elastic(case, seen, quiet)
    return found + [f"left {one}" for one in seen.left]


def _elastic(case: Case, seen: Seen, quiet: Quiet) -> list[str]:
    found = []
    if case.back_s is not None:
        found += _within("back", seen.back_s and seen.back_s - quiet.step_s, case.back_s)
    if case.whole_again:
        found += _within("all ranks back", seen.whole_s, quiet.start_s + ELASTIC_START_S)
    if case.kept and seen.redone and not case.steady:
        found.append(f"{seen.redone} committed steps lost")
    return found


def _within(what: str, seconds: float | None, limit_s: float) -> list[str]:
    if seconds is None:
        return [f"not {what}"]
    return [f"{what} after {seconds:.2f} s, expected {limit_s:.2f}"] if seconds > limit_s else []
