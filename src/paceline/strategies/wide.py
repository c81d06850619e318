"""The mean in a wider type than the gradients have."""

from dataclasses import dataclass

import torch

from paceline.collectives.api import Op, Transport
from paceline.collectives.reduction import Flight, GradBucket, used_here
from paceline.strategies.sparse import mean_of_rows


@dataclass(frozen=True, slots=True)
class Wide:
    """The mean of gradients in a narrow type, sent, added and divided in `dtype`, and rounded once."""

    dtype: torch.dtype = torch.float32
    chains: bool = False
    trivial_alone: bool = True

    def divides(self, transport: Transport, device: torch.device) -> bool:
        return True

    def __call__(self, bucket: GradBucket, transport: Transport) -> Flight:
        narrow = bucket.buffer()
        if narrow.is_sparse:
            return mean_of_rows(narrow, transport)
        wide = narrow.to(torch.promote_types(narrow.dtype, self.dtype))

        def land() -> None:
            narrow.copy_(wide)
            used_here(wide)

        return Flight(transport.all_reduce(wide, Op.MEAN), land)
