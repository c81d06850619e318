"""Checksums of the slices that ranks exchange of a bucket: verify that what arrives is what was sent.

Every rank records the checksum of each slice that it sends and receives; when the bucket is complete, one small message
tells every rank what the others have sent to it. So nothing is added to the slices themselves, and damage is known
before any rank uses the sums.
"""

from collections.abc import Callable, Generator

import torch

from paceline.collectives.protocols import Transport, Work

ROW = 127  # words

# Called with the rank whose message was damaged on its way here.
OnDamage = Callable[[int], None]


class SliceChecksums:
    """The checksums of one bucket on one rank."""

    def __init__(self, size: int, on_damage: OnDamage) -> None:
        self._size = size
        self._on_damage = on_damage
        self._sent: list[torch.Tensor] = []  # for each exchange, a number for every rank
        self._received: list[torch.Tensor] = []

    def sends(self, flat: torch.Tensor) -> None:
        """An equal part of `flat` goes to each rank."""
        self._sent.append(self._of_parts(flat))

    def received(self, slices: torch.Tensor) -> None:
        """One part has arrived from each rank."""
        self._received.append(self._of_parts(slices))

    def gathered(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Every rank has sent one slice, this one `own`, to all."""
        self._sent.append(checksum(own).expand(self._size))
        self._received.append(self._of_parts(whole))

    def compare(self, transport: Transport) -> Generator[Work]:
        """Tell every rank what it should have received, and check what arrived here."""
        sent = torch.stack(self._sent, dim=1).contiguous()  # a row for every rank
        expected = torch.empty_like(sent)
        yield transport.all_to_all(expected.view(-1), sent.view(-1))
        differs = (expected != torch.stack(self._received, dim=1)).any(1)
        for rank in differs.nonzero().flatten().tolist():
            self._on_damage(rank)

    def _of_parts(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.stack([checksum(part) for part in flat.view(self._size, -1)])


def checksum(flat: torch.Tensor) -> torch.Tensor:
    """A wrapping sum of the bits of a flat tensor on the host, in words of 64 bits.

    One changed bit always changes it. The sums of rows of words have factors that differ, so rows that have changed
    places are noticed; odd factors lose nothing.
    """
    raw = flat.contiguous().view(torch.uint8)
    rest = len(raw) % 8
    words = _words(raw[: len(raw) - rest])
    rows = len(words) // ROW
    sums = torch.cat([words[: rows * ROW].view(rows, ROW).sum(1), words[rows * ROW :], raw[len(raw) - rest :].long()])
    return (sums * (2 * torch.arange(len(sums), device="cpu") + 1)).sum()


def _words(raw: torch.Tensor) -> torch.Tensor:
    return (raw if raw.storage_offset() % 8 == 0 else raw.clone()).view(torch.int64)
