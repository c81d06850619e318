"""Checked collectives with which ranks agree about checkpoints. They work in a world of one, too."""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from paceline.checkpoint.checkpoint_errors import CheckpointMismatch, Damaged, Skipped
from paceline.checkpoint.open_snapshot import Chunk
from paceline.checkpoint.snapshots import Snapshot, place_of
from paceline.collectives.checked import all_gather
from paceline.collectives.gather import message_of
from paceline.stored.directory import make_directory
from paceline.stored.tensor_file import bytes_of

OptionalGroup = dist.ProcessGroup | None
HEAD = 8192  # bytes of every rank that are gathered at once
MOST_THREADS = 8  # that verify on one rank; with more, memory bandwidth is the limit


def rank_and_size(group: OptionalGroup) -> tuple[int, int]:
    """This rank and the size of the world."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gather_bytes(blob: bytes, group: OptionalGroup) -> list[bytes]:
    """The bytes of every rank, of any length. Short values take one collective: their length is sent along."""
    heads = _gather_padded(len(blob).to_bytes(8, "little") + blob[: HEAD - 8], HEAD, group)
    sizes = [int.from_bytes(head[:8], "little") for head in heads]
    longest = max(sizes) - (HEAD - 8)
    rests = _gather_padded(blob[HEAD - 8 :], longest, group) if longest > 0 else [b""] * len(sizes)
    return [(head[8:] + rest)[:size] for head, rest, size in zip(heads, rests, sizes, strict=True)]


def _gather_padded(blob: bytes, size: int, group: OptionalGroup) -> list[bytes]:
    padded = torch.frombuffer(bytearray(blob.ljust(size, b"\0")), dtype=torch.uint8)
    return [bytes(bytes_of(row)) for row in all_gather(padded, group=group)]


def gather(value: Any, group: OptionalGroup) -> list[Any]:
    """The value of every rank, in rank order: anything that JSON can hold, of any size."""
    blobs = gather_bytes(json.dumps(value).encode(), group)
    return [message_of(blob, rank, "a message about checkpoints") for rank, blob in enumerate(blobs)]


def text_hash(text: str) -> str:
    """A hash that ranks compare instead of a long text."""
    return hashlib.sha256(text.encode()).hexdigest()


def homes_of(directory: Path, group: OptionalGroup) -> list[int] | None:
    """For each rank, the lowest of those that see the same `directory`. All ranks call it.

    Hosts that do not share a directory each have their own, so every rank creates a file and looks for those of lower
    ranks. None means that some rank could not: then rank 0 alone should write, and its error will say what is wrong;
    ask again later.
    """
    rank, size = rank_and_size(group)
    if size == 1:
        return [0]
    token = gather(secrets.randbits(60), group)[0]
    probe = f".seen-{token:x}-"
    try:
        make_directory(directory)
        (directory / f"{probe}{rank}").touch(exist_ok=False)
        put_down = True
    except OSError:
        put_down = False
    try:
        everywhere = all(gather(put_down, group))
        # Looked up by name: on a network file system a listing may be out of date.
        lowest = next((other for other in range(rank) if os.path.lexists(directory / f"{probe}{other}")), rank)
        homes = gather(lowest, group)  # all ranks have looked
    finally:
        if put_down:
            (directory / f"{probe}{rank}").unlink()
    return homes if everywhere else None


class Looked(Protocol):
    """A snapshot that a rank is about to read from."""

    problem: str  # why it cannot, as far as known without reading all of it

    @property
    def needed(self) -> Sequence[Chunk]:
        """The chunks it will read or, if there is a problem, those that could explain it."""

    def verify(self, chunks: Sequence[Chunk], threads: int) -> None:
        """Compare the bytes of some chunks with the manifest. Raises Damaged."""


Look = Callable[[Snapshot], Looked]  # raises Damaged


def newest_on_all(
    found: Sequence[Snapshot], refused: Sequence[Damaged], look: Look, group: OptionalGroup
) -> tuple[Snapshot | None, tuple[Skipped, ...]]:
    """The newest snapshot that is intact on every rank, and those that were skipped; the same on all ranks.

    `found` is what this rank sees, newest first. In each round every rank names the newest that it has, ranks that
    named a newer one than others go back to theirs, and ranks that see the same files each verify a part of what any of
    them needs.
    """
    rank = rank_and_size(group)[0]
    skipped = [Skipped(error.path.name, rank, error.why) for error in refused]
    left = list(found)

    def pass_over(why: str) -> None:
        skipped.append(Skipped(left.pop(0).path.name, rank, why))

    while True:
        rows = gather([left[0].key, place_of(left[0])] if left else [(-1, 0), ""], group)
        keys = [tuple(key) for key, _ in rows]
        places = [place for _, place in rows]
        lowest = min(keys)
        if any(key != lowest for key in keys):
            while left and left[0].key > lowest:
                pass_over(f"rank {keys.index(lowest)} has no intact copy of it")
            continue
        if not left:
            break
        sharing = [other for other, place in enumerate(places) if place == places[rank]]
        whys = gather(_verify_together(left[0], look, sharing, group), group)
        bad = [place for place, why in zip(places, whys, strict=True) if why]
        if not bad:
            break
        lacking = next(other for other, place in enumerate(places) if place in bad)
        pass_over(next((whys[other] for other in sharing if whys[other]), f"rank {lacking} has no intact copy of it"))
    everywhere = [Skipped(**fields) for own in gather([asdict(one) for one in skipped], group) for fields in own]
    return (left[0] if left else None), tuple(everywhere)


def _verify_together(snapshot: Snapshot, look: Look, sharing: Sequence[int], group: OptionalGroup) -> str:
    """Verify this rank's part of what the ranks `sharing` its files need. Returns the problem, if there is one."""
    looked, why, runs = None, "", dict[str, list[list[int]]]()
    try:
        looked = look(snapshot)
        runs = _runs(looked.needed)
    except Damaged as error:
        why = error.why
    rows = gather(runs, group)
    if looked is None:
        return why
    needed = {
        (name, number)
        for other in sharing
        for name, spans in rows[other].items()
        for first, last in spans
        for number in range(first, last)
    }
    ordered = sorted(needed)
    here, ranks = sharing.index(rank_and_size(group)[0]), len(sharing)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        own = ordered[len(ordered) * here // ranks : len(ordered) * (here + 1) // ranks]
        looked.verify(own, max(1, min(cores // ranks, MOST_THREADS)))
    except Damaged as error:
        return error.why
    return looked.problem


def _runs(chunks: Iterable[Chunk]) -> dict[str, list[list[int]]]:
    """Chunks as ranges of numbers, by file. There are few, because a rank reads long stretches."""
    found: dict[str, list[list[int]]] = {}
    for name, number in sorted(set(chunks)):
        spans = found.setdefault(name, [])
        if spans and spans[-1][1] == number:
            spans[-1][1] = number + 1
        else:
            spans.append([number, number + 1])
    return found


@contextmanager
def raising_together(group: OptionalGroup) -> Iterator[None]:
    """Raise on all ranks if any rank has a problem."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below, when the others know
        problem = error
    for rank, text in enumerate(gather(problem and str(problem), group)):
        if text:
            raise problem or CheckpointMismatch(f"rank {rank}: {text}")
