"""paceline's own class, through the public API."""

from typing import Any

import paceline
from paceline.bench.contenders.trainee import Place, Trainee, all_reduce_alone, all_reduce_bytes, details, update_with
from paceline.bench.model import build_model, build_optimizer
from paceline.observe.overlap import read_overlap


def build(place: Place) -> Trainee:
    model = build_model(place.spec, place.device)
    arguments = dict(place.arguments)
    if place.name == "paceline-torch":
        arguments["transport"] = "torch"
    if place.device.type == "cuda":
        arguments["device_ids"] = [place.device.index]
    wrapped = paceline.DistributedDataParallel(model, **arguments)
    update = update_with(place.spec, build_optimizer(place.spec, wrapped))

    def observe() -> dict[str, Any]:
        found = read_overlap(wrapped.trace.stamps())
        plan = getattr(wrapped, "bucket_plan", None)
        predicted = getattr(plan, "predicted_exposed_s", None)
        sizes = [bucket.nbytes for bucket in wrapped.layout.buckets]
        return found | {"bucket_bytes": sizes, "predicted_exposed_s": predicted}

    def communicate() -> None:
        all_reduce_alone([bucket.numel for bucket in wrapped.layout.buckets], place)()

    # On a GPU the host does not learn when a bucket is through, so the trace cannot tell what was hidden.
    from_trace = place.device.type == "cpu" or place.size == 1
    return Trainee(
        wrapped,
        update,
        details(model.parameters),
        all_reduce_bytes(model, place.size),
        quiet=wrapped.no_sync,
        observe=observe,
        communicate=None if from_trace else communicate,
    )
