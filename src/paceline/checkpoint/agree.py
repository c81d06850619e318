"""What ranks tell each other about checkpoints, by checked collectives. A world of one tells itself."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from paceline.checkpoint.faults import Damaged, Skipped
from paceline.checkpoint.generations import Generation
from paceline.collectives.checked import all_gather, all_reduce
from paceline.stored.tensor_file import bytes_of

Group = dist.ProcessGroup | None
_NOTHING = (-1, 0)


def here(group: Group) -> tuple[int, int]:
    """This rank and the size of the world."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _device(group: Group) -> torch.device:
    """A device whose tensors the group can send."""
    if here(group)[1] == 1 or "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def gather(numbers: Sequence[int], group: Group) -> list[tuple[int, ...]]:
    """The numbers of every rank, equally many on each."""
    rows = all_gather(torch.tensor(numbers, dtype=torch.int64, device=_device(group)), group=group)
    return [tuple(int(number) for number in row.tolist()) for row in rows]


def gather_bytes(blob: bytes, group: Group) -> list[bytes]:
    """The bytes of every rank, of any length."""
    sizes = [size for (size,) in gather([len(blob)], group)]
    if not max(sizes):
        return [b""] * len(sizes)
    padded = bytearray(blob.ljust(max(sizes), b"\0"))
    own = torch.frombuffer(padded, dtype=torch.uint8).to(_device(group))
    rows = all_gather(own, group=group)
    return [bytes(bytes_of(row.cpu())[:size]) for row, size in zip(rows, sizes, strict=True)]


def gather_text(text: str, group: Group) -> list[str]:
    """The text of every rank; one round trip when nobody has any."""
    return [blob.decode() for blob in gather_bytes(text.encode(), group)]


def number_of(text: str) -> int:
    """A number of 60 bits that differs when the text does."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


class Cadence:
    """A question that all ranks answer together, at least once in `seconds`, though it is asked in every step.

    Rank 0's clock says after how many calls the ranks talk again, so all of them know without talking. They talk more
    often where that costs less than a hundredth of the time: then it matters less if steps grow longer all at once.
    """

    COST = 0.01

    def __init__(self, seconds: float, group: Group) -> None:
        self._seconds = seconds
        self._group = group
        self._calls_left = 0
        self._pause = 1
        self._talked = 0.0
        self._talk_s = math.inf

    def ask(self, flag: bool) -> bool | None:
        """Whether any rank said yes, or None when the ranks did not talk in this call."""
        if self._calls_left > 0:
            self._calls_left -= 1
            return None
        leads = here(self._group)[0] == 0
        words = [int(flag), self._next_pause() if leads else 0]
        started = time.monotonic()
        told = all_reduce(torch.tensor(words, device=_device(self._group)), "max", group=self._group).tolist()
        self._talk_s = min(self._talk_s, time.monotonic() - started)  # the least: the rest is waiting for late ranks
        self._pause = max(1, int(told[1]))
        self._calls_left = self._pause - 1
        return bool(told[0])

    def _next_pause(self) -> int:
        now = time.monotonic()
        per_call = (now - self._talked) / self._pause
        pause = 1
        if self._talked and per_call > 0:
            cheap = math.ceil(self._talk_s / self.COST / per_call)
            # It grows by doubling: the first steps are no measure of the others.
            pause = max(1, min(int(self._seconds / per_call), cheap, 2 * self._pause))
        self._talked = now
        return pause


def newest_on_all(
    found: Sequence[Generation], refused: Sequence[Damaged], check: Callable[[Generation], None], group: Group
) -> tuple[Generation | None, tuple[Skipped, ...]]:
    """The newest generation that is good on every rank, and what was passed over, the same on all ranks.

    `found` is what this rank sees, newest first; `check` raises Damaged. In each round every rank names the newest
    good one that it has, and those who named a newer one than others go down to theirs.
    """
    rank = here(group)[0]
    skipped = [Skipped(error.path.name, rank, error.why) for error in refused]
    left = list(found)
    good: Generation | None = None
    while True:
        while left and left[0] is not good:
            try:
                check(left[0])
                good = left[0]
            except Damaged as error:
                skipped.append(Skipped(left.pop(0).path.name, rank, error.why))
        keys = gather(left[0].key if left else _NOTHING, group)
        lowest = min(keys)
        if all(key == lowest for key in keys):
            break
        lacking = keys.index(lowest)
        while left and left[0].key > lowest:
            skipped.append(Skipped(left.pop(0).path.name, rank, f"rank {lacking} has no good copy of it"))
    told = json.dumps([[one.path, one.rank, one.why] for one in skipped]) if skipped else ""
    everywhere = [Skipped(*fields) for text in gather_text(told, group) if text for fields in json.loads(text)]
    return (left[0] if left else None), tuple(everywhere)
