"""One collective of one rank, from its start to its completion."""

from collections.abc import Callable

from paceline.collectives.shm import record
from paceline.collectives.shm.crossing import Crossing
from paceline.collectives.shm.plan import Sources, Summing
from paceline.errors import CollectiveMismatch


class Operation:
    """One collective of this rank.

    `read` copies out of the others' memory; None for an all_reduce, which is summed by a `Summing`. `after` runs when
    all ranks have finished. `keep` is what must stay alive until then. `early`: the others read nothing that belongs to
    the caller, so for it the operation is over when this rank has read.
    """

    __slots__ = (
        "after",
        "arena",
        "crossing",
        "early",
        "error",
        "keep",
        "number",
        "numel",
        "offset",
        "over",
        "read",
        "spreads",
        "word",
    )

    def __init__(
        self,
        word: int,
        numel: int,
        place: tuple[int, int],
        *,
        keep: object,
        read: Callable[[Sources], None] | None = None,
        after: Callable[[], None] | None = None,
        early: bool = False,
    ) -> None:
        self.word = word
        self.numel = numel
        self.arena, self.offset = place
        self.keep = keep
        self.read = read
        self.after = after
        self.early = early
        self.number = -1
        self.crossing: Crossing | None = None  # on its way between hosts
        self.spreads: Summing | None = None  # what is to be done when it has arrived
        self.error: CollectiveMismatch | None = None
        self.over = False

    def __str__(self) -> str:
        return record.text_of(self.word, self.numel)
