"""How ranks of a new generation receive the state from which it continues: in one piece.

The launcher says whose state is used (`launch/next_generation.py`). If all survivors are whole at one step they have it
already, and no bytes move. Otherwise all that are behind, torn or new take everything from one rank or, if the state is
in shards, from one rank per shard. They never take part of it: ranks that were healed tensor by tensor have ended in a
state that no run was ever in.

A rank changes nothing before everything it needs has arrived (`receive`); the result is then compared (`check`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.checkpoint.compare import digests_of
from paceline.collectives.gather import gather_bytes, gather_ints, gather_unless_equal
from paceline.collectives.group import Group
from paceline.elastic.declared import Declared, digest_of
from paceline.elastic.resharding import Sums, broadcast, check_sums, receive_parts, sums_of
from paceline.elastic.split_state import Parts, SplitState
from paceline.errors import ReplicasDiffer, UsageError
from paceline.stored.packed import pack, unpack

WHAT = "the comparison of states"


class Standing(NamedTuple):
    """The state of one rank in a new generation."""

    behind: bool  # its state is not the one from which the generation continues
    moves: bool  # it needs shards that it does not have
    lacking: bool  # its parameters lack what lost ranks have made of them


@dataclass
class Received:
    """What this rank has received and not yet loaded."""

    state: dict[str, SplitState] = field(default_factory=dict)
    digests: list[int] = field(default_factory=list)  # of the state that all ranks share, on the source
    compared: list[str] = field(default_factory=list)  # the names of those objects, if this rank has loaded them
    sums: Sums | None = None  # of the shards of all sources; None: no shard has moved


def compare_declared(group: Group, declared: Declared, own: Standing) -> list[Standing]:
    """Gather the standing of all ranks. All call it. Raises UsageError on all if they have declared different
    objects."""
    rows = gather_ints(group, [*map(int, own), declared.signature()], WHAT)
    if len({signature for *_, signature in rows}) > 1:
        told = gather_unless_equal(group, {name: type(t).__name__ for name, t in declared.things.items()}, WHAT)
        what = told or "optimizers whose parameters differ, or are in another order"
        raise UsageError(f"ranks have declared different objects to paceline.Elastic: {what}; declare the same on all")
    return [Standing(*map(bool, row[:-1])) for row in rows]


def receive(
    group: Group,
    declared: Declared,
    sources: Sequence[int],
    own: Standing,
    held: Mapping[str, SplitState] | None = None,
) -> Received:
    """Receive what this rank lacks of the state that `sources` hold between them. All ranks call it. `held`: the state
    of this rank, if it has already moved on to another cut."""
    held = declared.state() if held is None else held
    digests = [digest_of(name, state.rest) for name, state in held.items()]
    rows = gather_ints(group, [*digests, int(own.behind), int(own.moves)], WHAT)
    source, wanted = sources[0], rows[sources[0]][:-2]
    rest: Mapping[str, Any] = {name: state.rest for name, state in held.items()}
    found, takes = Received(digests=wanted), own.behind and digests != wanted
    if any(row[-2] and row[:-2] != wanted for row in rows):  # unless they happen to have equal bits, as at the start
        blob = broadcast(group, pack(rest, "state") if group.rank == source else b"", source)
        if takes:
            rest, found.compared = unpack(blob), list(held)
    parts: Mapping[str, Parts] = {}
    if any(row[-1] for row in rows):
        had = sums_of(held) if group.rank in sources else {}
        parts, found.sums = receive_parts(group, declared, sources, held, moves=own.moves), had
    if takes:
        found.state = {name: SplitState(rest[name], parts.get(name, {})) for name in held}
    elif own.moves:
        found.state = {name: SplitState(rest[name], parts[name]) for name in parts}
    return found


def check(group: Group, declared: Declared, received: Received, sources: Sequence[int]) -> None:
    """Compare the ranks' current state with that of the sources. All ranks call it."""
    now = declared.state()
    problems = [
        name
        for name, right in zip(now, received.digests, strict=True)
        if name in received.compared and digest_of(name, now[name].rest) != right
    ]
    told = gather_bytes(group, ", ".join(problems).encode(), WHAT)
    if wrong := [(rank, names.decode()) for rank, names in enumerate(told) if names]:
        rank, names = wrong[0]
        raise ReplicasDiffer(
            f"rank {rank} has loaded the state of rank {sources[0]}, and {names} is not bit-identical "
            f"afterwards: its load_state_dict() must restore all that its state_dict() returns"
        )
    if received.sums is not None:
        check_sums(group, received.sums, sums_of(now), declared.due.shards)


def check_parameters(group: Group, declared: Declared) -> None:
    """Raise ReplicasDiffer on all ranks unless the whole parameters have the same bits on all of them."""
    params = declared.whole_parameters()
    rows = gather_bytes(group, json.dumps(digests_of([param for _, param in params])).encode(), WHAT)
    if wrong := next((rank for rank, row in enumerate(rows) if row != rows[0]), None):
        pairs = zip(json.loads(rows[0]), json.loads(rows[wrong]), params, strict=True)
        name = next(name for one, other, (name, _) in pairs if one != other)
        raise ReplicasDiffer(
            f"ranks have gathered the parameters again from their owners, and {name} differs between rank 0 and "
            f"rank {wrong}: test the memory and the network of these machines"
        )
