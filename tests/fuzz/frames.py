"""Frames that are almost right: valid ones with some bytes, or some values of their JSON, replaced."""

import json
import random
from collections.abc import Callable
from typing import Any

INTERESTING = (
    b"\0",
    b"\xff",
    b"\n",
    b"\r",
    b'"',
    b"{",
    b"[",
    b"\x80\x81",
    b"NaN",
    b"-1",
    b"9" * 20,
    b"9" * 5000,
    b"1e999",
)
NUMBERS = (
    0,
    -1,
    1,
    255,
    1 << 31,
    1 << 32,
    1 << 62,
    1 << 63,
    -(1 << 63),
    1 << 64,
    10**30,
    1.5,
    -0.0,
    float("nan"),
    1e308,
)
DEEP = 3000  # deeper than the stack of Python's JSON
Frame = bytes


def mutated(frame: Frame, others: tuple[Frame, ...], draw: random.Random) -> Frame:
    """A frame made of this one: mostly near it, at times of random bytes."""
    kind = draw.random()
    if kind < 0.05:
        return draw.randbytes(draw.randrange(200))
    if kind < 0.5 and (found := _json_mutated(frame, draw)) is not None:
        return found
    changed = bytearray(frame)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        draw.choice(_EDITS)(changed, others, draw)
    return bytes(changed)


def _at(frame: bytearray, draw: random.Random) -> int:
    return draw.randrange(len(frame) + 1)


def _flip(frame: bytearray, _: tuple[Frame, ...], draw: random.Random) -> None:
    if frame:
        frame[draw.randrange(len(frame))] ^= 1 << draw.randrange(8)


def _insert(frame: bytearray, _: tuple[Frame, ...], draw: random.Random) -> None:
    at = _at(frame, draw)
    frame[at:at] = draw.choice(INTERESTING)


def _delete(frame: bytearray, _: tuple[Frame, ...], draw: random.Random) -> None:
    at = _at(frame, draw)
    del frame[at : at + draw.randrange(1, 40)]


def _truncate(frame: bytearray, _: tuple[Frame, ...], draw: random.Random) -> None:
    del frame[_at(frame, draw) :]


def _repeat(frame: bytearray, _: tuple[Frame, ...], draw: random.Random) -> None:
    at = _at(frame, draw)
    frame[at:at] = frame[at : at + 60] * draw.randrange(1, 20)


def _splice(frame: bytearray, others: tuple[Frame, ...], draw: random.Random) -> None:
    other = draw.choice(others)
    at, begin = _at(frame, draw), draw.randrange(len(other) + 1)
    frame[at : at + draw.randrange(60)] = other[begin : begin + draw.randrange(60)]


def _number(frame: bytearray, _: tuple[Frame, ...], draw: random.Random) -> None:
    """Eight bytes in the place where a length may be."""
    at = draw.choice((0, 8, 16, _at(frame, draw)))
    number = draw.choice((0, 1, 7, len(frame), len(frame) - 8, 1 << 31, 1 << 62, (1 << 64) - 1))
    frame[at : at + 8] = (number % (1 << 64)).to_bytes(8, "little")


_EDITS: tuple[Callable[[bytearray, tuple[Frame, ...], random.Random], None], ...] = (
    _flip, _flip, _insert, _delete, _truncate, _repeat, _splice, _number,
)  # fmt: skip


def _json_mutated(frame: Frame, draw: random.Random) -> Frame | None:
    """The frame with a value of its JSON replaced; None for one that is no JSON, not even in one of its lines."""
    *before, last = frame.strip(b"\n").split(b"\n")
    try:
        tree = json.loads(last)
    except (ValueError, RecursionError):
        return None
    end = b"\n" if frame.endswith(b"\n") else b""
    if draw.random() < 0.01:
        return b"[" * DEEP + b"]" * DEEP + end
    try:
        text = json.dumps(changed_value(tree, draw))
    except (ValueError, RecursionError):
        return None
    return b"\n".join([*before, text.encode()]) + end


def changed_value(tree: Any, draw: random.Random) -> Any:
    """A copy of the tree in which something is replaced, taken out, doubled or renamed."""
    if isinstance(tree, dict) and tree and draw.random() < 0.85:
        key = draw.choice(list(tree))
        rest = {name: value for name, value in tree.items() if name != key}
        kind = draw.random()
        if kind < 0.1:
            return rest
        if kind < 0.2:
            return {**rest, str(any_value(draw))[:20]: tree[key]}
        return {**tree, key: changed_value(tree[key], draw)}
    if isinstance(tree, list) and tree and draw.random() < 0.85:
        at = draw.randrange(len(tree))
        kind = draw.random()
        if kind < 0.1:
            return [*tree[:at], *tree[at + 1 :]]
        if kind < 0.2:
            return [*tree, tree[at]]
        return [*tree[:at], changed_value(tree[at], draw), *tree[at + 1 :]]
    return any_value(draw)


def any_value(draw: random.Random, depth: int = 0) -> Any:
    """Any value that JSON has."""
    kind = draw.randrange(9 if depth < 3 else 7)
    if kind < 3:
        return draw.choice(NUMBERS)
    if kind < 5:
        return draw.choice(
            ("", "x", "\0", "\ud800", "é", "../..", "1", "nan", "rank 1", "x" * 3000, "$", "tensor", "-1")
        )
    if kind == 5:
        return draw.choice((None, True, False))
    if kind == 6:
        return draw.randrange(-4, 20)
    if kind == 7:
        return [any_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    names = ("$", "value", "items", "kind", "name", "rank", "x")
    return {draw.choice(names): any_value(draw, depth + 1) for _ in range(draw.randrange(4))}
