"""paceline's own class, through the public API.

`paceline` is imported where it is used: by then it may be another checkout's (see `bench.checkout`).
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from paceline.bench.contenders.several import several_of_one
from paceline.bench.contenders.trainee import Place, Trainee, all_reduce_alone, all_reduce_bytes, details, update_with
from paceline.bench.model import build_model, build_optimizer
from paceline.bench.spec import StepSpec
from paceline.observe.overlap import read_overlap

CHECKS: dict[str, dict[str, Any]] = {
    "agreement": {"state_every": 64, "not_finite": "skip"},
    "no-agreement": {"state_every": 0, "not_finite": "keep"},
}


def build(place: Place) -> Trainee:
    import paceline

    model = build_model(place.spec, place.device)
    in_lanes = place.name.startswith("lanes")
    wrapped = paceline.DistributedDataParallel(model, **wrapped_with(place))
    update = update_with(place.spec, build_optimizer(place.spec, wrapped))

    def observe() -> dict[str, Any]:
        found = read_overlap(wrapped.trace.stamps())
        plan = getattr(wrapped, "bucket_plan", None)
        predicted = getattr(plan, "predicted_exposed_s", None)
        sizes = [bucket.nbytes for bucket in wrapped.layout.buckets]
        return found | {"bucket_bytes": sizes, "predicted_exposed_s": predicted}

    def communicate() -> None:
        all_reduce_alone([bucket.numel for bucket in wrapped.layout.buckets], place)()

    made = Trainee(
        wrapped,
        update,
        details(model.parameters),
        all_reduce_bytes(model, place.size),
        quiet=wrapped.no_sync,
    )
    if place.own:
        # On a GPU the host does not learn when a bucket is through, so the trace cannot tell what was hidden.
        from_trace = place.device.type == "cpu" or place.size == 1
        made = replace(made, observe=observe, communicate=None if from_trace else communicate)
    if in_lanes:  # which are the mean over all of them by themselves
        return replace(made, turns=wrapped.lanes, quiet=nullcontext, divides=True)
    return made


def wrapped_with(place: Place) -> dict[str, Any]:
    """What the model is wrapped with: by the contender's name, and by what was written behind it."""
    from paceline import Agreement

    found: dict[str, Any] = {}
    if place.counts_as_several:
        found["transport"] = several_of_one()
    if place.name.endswith("-torch"):
        found["transport"] = "torch"
    if place.name.startswith("lanes"):
        found |= {"lanes": lanes_of(place.spec), "seed": place.spec.seed}
    if place.device.type == "cuda":
        found["device_ids"] = [place.device.index]
    if place.name in CHECKS:
        return found | {"agreement": Agreement(**CHECKS[place.name] | place.arguments)}
    return found | place.arguments


def lanes_of(spec: StepSpec) -> int:
    """As many as there are micros in a step, so that the work is that of the plain mode."""
    return spec.ranks * spec.accumulate
