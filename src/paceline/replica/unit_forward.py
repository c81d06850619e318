"""The forward of a replica whose parameters are in shards, as seen by torch.compile."""

import weakref
from typing import Any

import torch


class ForwardInUnits:
    """Runs what torch's forward runs, in a file that Dynamo skips without counting graph breaks.

    Dynamo traces torch's own forward, to split graphs at buckets while the module runs. If parameters are
    sharded, hooks between units split them already, and it would break at each paceline function.
    """

    def __init__(self, replica: Any) -> None:
        self._replica = weakref.ref(replica)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        replica = self._replica()
        assert replica is not None, "the caller holds the replica"
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = replica._pre_forward(*inputs, **kwargs)
            return replica._post_forward(replica._run_ddp_forward(*inputs, **kwargs))
