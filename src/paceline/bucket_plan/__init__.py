"""Where to cut the stream of gradients into buckets, from measured times. Pure functions on values."""

from paceline.bucket_plan.cost import Cost, Ready, ReadyCurve, fit_cost
from paceline.bucket_plan.plan import INLINE_BUCKET_BYTES, Plan, decode_groups, encode_groups, plan_boundaries

__all__ = [
    "INLINE_BUCKET_BYTES",
    "Cost",
    "Plan",
    "Ready",
    "ReadyCurve",
    "decode_groups",
    "encode_groups",
    "fit_cost",
    "plan_boundaries",
]
