"""What a rank says about each collective it begins: eight words in a ring that all ranks of the host can read."""

import torch

from paceline.collectives.api import Op
from paceline.collectives.shm import memory
from paceline.collectives.shm.memory import Descriptor

RING = 256  # collectives that a rank may have begun and not completed
WORDS = 8
NBYTES = (1 + RING) * WORDS * 8
ALL_REDUCE, BROADCAST, ALL_GATHER, EXCHANGE = range(4)

_KINDS = ("all_reduce", "broadcast", "all_gather", "exchange")
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
_OP_CODES = {op: code for code, op in enumerate(_OPS)}
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


def knows(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype can be combined here."""
    return dtype in _DTYPE_CODES


def call_word(kind: int, dtype: torch.dtype, *, op: Op = Op.SUM, root: int = 0) -> int:
    """All that must be equal on all ranks, but for the number of elements."""
    return kind | _OP_CODES[op] << 8 | _DTYPE_CODES[dtype] << 16 | root << 32


def kind_of(word: int) -> str:
    return _KINDS[word & 0xFF]


def op_of(word: int) -> Op:
    return _OPS[word >> 8 & 0xFF]


def dtype_of(word: int) -> torch.dtype:
    return _DTYPES[word >> 16 & 0xFF]


def text_of(word: int, numel: int) -> str:
    """A call in the words of `api.describe`."""
    kind = word & 0xFF
    detail = op_of(word).value if kind == ALL_REDUCE else f"root={word >> 32}" if kind == BROADCAST else ""
    return f"{kind_of(word)}({detail}) of {str(dtype_of(word)).removeprefix('torch.')}[{numel}]"


class ControlPage:
    """The page in which one rank writes its records, and its counters as a hint. See `Mesh` for who reads what when."""

    def __init__(self, descriptor: Descriptor) -> None:
        buffer = memory.map_shared(descriptor, NBYTES, populate=True)
        self._bytes = memoryview(buffer).cast("B")
        self._words = self._bytes.cast("q")
        self.hint = self._bytes.cast("Q")  # its first word: how often this rank has begun and finished

    def write(self, number: int, word: int, numel: int, arena: int, offset: int, notices: int) -> None:
        words, at = self._words, (1 + number % RING) * WORDS
        words[at] = number
        words[at + 1] = word
        words[at + 2] = numel
        words[at + 3] = arena
        words[at + 4] = offset
        words[at + 5] = notices

    def call(self, number: int) -> bytes:
        """The four words that say what to do with which memory, as bytes: they can be compared and looked up."""
        at = (1 + number % RING) * WORDS * 8
        return self._bytes[at + 8 : at + 40].tobytes()

    def notices(self, number: int) -> int:
        """How many notices the rank had sent when it began this collective."""
        at = (1 + number % RING) * WORDS
        assert self._words[at] == number
        return self._words[at + 5]
