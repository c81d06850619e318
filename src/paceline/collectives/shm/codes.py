"""A collective as one integer, so that ranks can publish what they call and compare it at once."""

from typing import NamedTuple

import torch

from paceline.collectives.protocols import Op

ALL_REDUCE, BROADCAST, ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER = range(5)

_KINDS = ("all_reduce", "broadcast", "all_gather", "all_to_all", "reduce_scatter")
_OPS = tuple(Op)
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
# The code of a type; the kind, the operation and the root are added by `|`. Types that are not here cannot be combined.
DTYPES = {dtype: number << 16 for number, dtype in enumerate(_DTYPES)}
OPS = {op: number << 8 for number, op in enumerate(_OPS)}
ROOT = 32  # by so many bits the root of a broadcast is shifted


class CodedCall(NamedTuple):
    """What must be equal on all ranks. The text is made when needed, worded as that of `CollectiveCall`."""

    code: int
    numel: int

    @property
    def kind(self) -> int:
        return self.code & 0xFF

    @property
    def kind_name(self) -> str:
        return _KINDS[self.kind]

    @property
    def op(self) -> Op:
        return _OPS[self.code >> 8 & 0xFF]

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.code >> 16 & 0xFF]

    @property
    def root(self) -> int:
        return self.code >> ROOT

    def __str__(self) -> str:
        reduces = self.kind in (ALL_REDUCE, REDUCE_SCATTER)
        detail = self.op.value if reduces else f"root={self.root}" if self.kind == BROADCAST else ""
        return f"{self.kind_name}({detail}) of {str(self.dtype).removeprefix('torch.')}[{self.numel}]"
