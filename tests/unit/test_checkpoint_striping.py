"""Who writes what: everything once in every directory, in equal shares, and by somebody who has it."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from paceline.checkpoint.checkpoint_errors import CheckpointError
from paceline.checkpoint.striping import BLOCK_ELEMENTS, SMALL_BYTES, Held, Span, stripe

MIB = 1 << 20


def written(held: list[Held], homes: list[int]) -> dict[int, Counter[tuple[int, int]]]:
    """For each directory, how often each block of each tensor is written. Checks that writers have what they write."""
    found: dict[int, Counter[tuple[int, int]]] = {home: Counter() for home in homes}
    for piece in stripe(held, homes):
        assert len({homes[rank] for rank in piece.writers}) == len(piece.writers), "once in every directory"
        for rank in piece.writers:
            span = held[piece.index].spans[rank]
            assert span is not None and span[0] <= piece.begin and piece.end <= span[1]
            assert rank in piece.holders
            for block in range(piece.begin // BLOCK_ELEMENTS, -(-piece.end // BLOCK_ELEMENTS)):
                found[homes[rank]][piece.index, block] += 1
    return found


def whole(name: str, numel: int, ranks: int, *, can_be_cut: bool = True) -> Held:
    return Held(name, numel, 4, [(0, numel)] * ranks, True, can_be_cut)


def test_what_all_hold_is_written_in_equal_stretches() -> None:
    held = [whole("a", 5 * MIB, 4), whole("b", 100, 4), whole("c", 3 * MIB, 4), whole("d", 1, 4)]
    shares: Counter[int] = Counter()
    for piece in stripe(held, [0] * 4):
        (writer,) = piece.writers
        shares[writer] += (piece.end - piece.begin) * 4
    assert sum(shares.values()) == sum(one.numel * 4 for one in held)
    assert max(shares.values()) - min(shares.values()) <= 4 * BLOCK_ELEMENTS * 4
    assert sum(1 for piece in stripe(held, [0] * 4)) == 7, "three cuts"


def test_small_tensors_and_those_that_cannot_be_cut_stay_whole() -> None:
    held = [whole(str(number), SMALL_BYTES // 4 - 1, 3) for number in range(20)]
    held.append(whole("odd", 2 * MIB, 3, can_be_cut=False))
    pieces = stripe(held, [0] * 3)
    assert sorted((piece.index, piece.begin, piece.end) for piece in pieces) == [
        (index, 0, one.numel) for index, one in enumerate(held)
    ]
    assert {writer for piece in pieces for writer in piece.writers} == {0, 1, 2}


def test_every_directory_has_what_its_ranks_hold() -> None:
    """Four ranks on two hosts, each host with two of four shards, and what all hold."""
    numel = 4 * MIB
    spans: list[Span | None] = [(rank * MIB, (rank + 1) * MIB) for rank in range(4)]
    held = [Held("shards", numel, 4, spans, True), whole("all", numel, 4)]
    found = written(held, [0, 0, 2, 2])
    blocks = numel // BLOCK_ELEMENTS
    for home, own in ((0, range(blocks // 2)), (2, range(blocks // 2, blocks))):
        assert {block for index, block in found[home] if index == 0} == set(own)
        assert {block for index, block in found[home] if index == 1} == set(range(blocks))
        assert set(found[home].values()) == {1}


def test_twins_share_the_work() -> None:
    """Shards over two ranks, which two others hold too."""
    spans: list[Span | None] = [(0, 4 * MIB), (4 * MIB, 8 * MIB)] * 2
    pieces = stripe([Held("w", 8 * MIB, 4, spans, True)], [0] * 4)
    shares = {piece.writers[0]: (piece.begin // MIB, piece.end // MIB, piece.holders) for piece in pieces}
    assert shares == {0: (0, 2, (0, 2)), 2: (2, 4, (0, 2)), 1: (4, 6, (1, 3)), 3: (6, 8, (1, 3))}
    assert written([Held("w", 8 * MIB, 4, spans, True)], [0, 0, 2, 2])[2].total() == 8 * MIB // BLOCK_ELEMENTS


def test_what_may_differ_comes_from_one_rank() -> None:
    held = [Held("w", 8 * MIB, 4, [(0, 8 * MIB)] * 4, equal=False)]
    assert [piece.writers for piece in stripe(held, [0, 0, 0, 0])] == [(0,)]
    assert [piece.writers for piece in stripe(held, [0, 0, 2, 2])] == [(0, 2)]


def test_what_nobody_holds_is_named() -> None:
    held = [Held("w", 300, 4, [(0, 100), (200, 300)], True)]
    with pytest.raises(CheckpointError, match="no rank holds the elements 100 to 200 of 'w'"):
        stripe(held, [0, 0])


def test_any_state_in_any_world_is_written_once_in_every_directory() -> None:
    rng = random.Random(0)
    for _ in range(200):
        ranks = rng.randint(1, 6)
        homes = [0]
        while len(homes) < ranks:
            homes.append(rng.choice([homes[-1], len(homes)]))
        held = []
        for number in range(rng.randint(1, 6)):
            numel = rng.choice([0, 1, 7, 1000, rng.randint(1, 6 * MIB)]) // BLOCK_ELEMENTS * BLOCK_ELEMENTS
            cuts = sorted(rng.randint(0, numel // BLOCK_ELEMENTS) * BLOCK_ELEMENTS for _ in range(ranks - 1))
            borders = [0, *cuts, numel]
            shards: list[Span | None] = list(pairwise(borders))
            spans = shards if rng.random() < 0.5 else [(0, numel)] * ranks
            held.append(Held(str(number), numel, 4, spans, True, rng.random() < 0.8))
        found = written(held, homes)
        for home, counted in found.items():
            assert set(counted.values()) <= {1}
            members = [rank for rank in range(ranks) if homes[rank] == home]
            expected = {
                (index, block)
                for index, one in enumerate(held)
                for rank in members
                for span in [one.spans[rank]]
                if span is not None
                for block in range(span[0] // BLOCK_ELEMENTS, -(-span[1] // BLOCK_ELEMENTS))
            }
            assert set(counted) == expected, "what its ranks hold, and nothing else"
