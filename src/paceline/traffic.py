"""What travels between ranks, as stamps tell it."""

from enum import Enum
from typing import NamedTuple


class CollectiveKind(Enum):
    """What a collective brings about. Which calls of a backend it is made of is the business of who makes them."""

    ALL_REDUCE = "all-reduce"  # every rank has the whole result
    REDUCE_SCATTER = "reduce-scatter"  # every rank keeps its shards of the result
    GATHER = "gather"  # every rank has the blocks of all


class Collective(NamedTuple):
    """What is launched, and waited for."""

    kind: CollectiveKind
    nbytes: int
    """Of the gradients that are reduced, or the parameters that are gathered, all of them, in their own type. A
    reduction may send them in another one, or compressed."""
    of: str = ""
    """Whose parameters are gathered; empty for a bucket, which has a number."""

    def __str__(self) -> str:
        return f"{self.kind.value}{self.of and f' of {self.of}'}, {self.nbytes:,} bytes"
