"""Small messages that the ranks of a group exchange."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from paceline.collectives.group import Group
from paceline.errors import Malformed, MessageDamaged
from paceline.typed_json import parse_json


def gather_row(group: Group, row: torch.Tensor, what: str) -> torch.Tensor:
    """One row per rank, in rank order. All ranks call it with rows of one length and type; `what` names the wait."""
    rows = torch.empty(group.size, row.numel(), dtype=row.dtype, device="cpu")
    group.wait(group.transport.all_gather(rows.view(-1), row), what)
    return rows


def gather_ints(group: Group, values: Sequence[int], what: str) -> list[list[int]]:
    """The integers of every rank. All ranks pass the same number of them."""
    if not values:
        return [[] for _ in range(group.size)]
    rows: list[list[int]] = gather_row(group, torch.tensor(values, dtype=torch.int64, device="cpu"), what).tolist()
    return rows


def gather_bytes(group: Group, payload: bytes, what: str) -> list[bytes]:
    """The payload of every rank. They may differ in length, so the lengths go first."""
    lengths = [length for (length,) in gather_ints(group, [len(payload)], what)]
    longest = max(lengths)
    if not longest:
        return [b""] * group.size
    padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8)
    rows = gather_row(group, padded, what)
    return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]


def gather_unless_equal(group: Group, value: Any, what: str) -> list[Any] | None:
    """The value of every rank, anything that JSON can hold, or None if it is the same everywhere.

    The first message has a fixed size: gloo ends the process when ranks offer different sizes.
    """
    text = json.dumps(value, sort_keys=True).encode()
    digests = gather_ints(group, list(hashlib.sha256(text).digest()), what)
    if all(digest == digests[0] for digest in digests):
        return None
    return [message_of(raw, rank, what) for rank, raw in enumerate(gather_bytes(group, text, what))]


def message_of(raw: bytes, rank: int, what: str) -> Any:
    """The JSON that a rank has sent. Raises MessageDamaged if it is malformed."""
    try:
        return parse_json(raw, what)
    except Malformed as error:
        raise MessageDamaged(f"a message from rank {rank} is damaged: {error}", ranks=[rank]) from error
