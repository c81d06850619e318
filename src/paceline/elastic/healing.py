"""How the ranks of a new generation that do not have the state that it goes on from get it: in one piece.

The launcher says whose state that is (`launch/next_generation.py`). Survivors that are all whole at one step have it
already, and no bytes move. Otherwise all that are behind, torn or new take everything from one rank, or, where the
state is in shards, from one rank for each shard. Never a part of it: ranks that were healed tensor by tensor have ended
in a state that no run has been in.

Nothing of a rank changes before all that it needs has come (`receive`); what it then has is compared (`check`).
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
    """Where one rank of a new generation stands."""

    behind: bool  # its state is not the one that the generation goes on from
    moves: bool  # it needs shards that it does not have
    lacking: bool  # its parameters lack what lost ranks have made of them


@dataclass
class Received:
    """What has come to this rank, and has not been put anywhere yet."""

    state: dict[str, SplitState] = field(default_factory=dict)
    digests: list[int] = field(default_factory=list)  # of what all ranks have alike, as the source has it
    compared: list[str] = field(default_factory=list)  # the names of these, where this rank has taken them
    sums: Sums | None = None  # of the shards of all sources; None: no shard has moved


def compare_declared(group: Group, declared: Declared, own: Standing) -> list[Standing]:
    """Where all ranks stand. All of them call it. Raises UsageError on all if they have declared different things."""
    rows = gather_ints(group, [*map(int, own), declared.signature()], WHAT)
    if len({signature for *_, signature in rows}) > 1:
        told = gather_unless_equal(group, {name: type(t).__name__ for name, t in declared.things.items()}, WHAT)
        what = told or "optimizers whose parameters are others, or in another order"
        raise UsageError(f"ranks have declared different things to paceline.Elastic: {what}; declare the same on all")
    return [Standing(*map(bool, row[:-1])) for row in rows]


def receive(
    group: Group,
    declared: Declared,
    sources: Sequence[int],
    own: Standing,
    held: Mapping[str, SplitState] | None = None,
) -> Received:
    """Get what this rank lacks of the state that `sources` have between them. All ranks call it. `held`: the state of
    this rank, where it has moved on to another cut already."""
    held = declared.state() if held is None else held
    digests = [digest_of(name, state.rest) for name, state in held.items()]
    rows = gather_ints(group, [*digests, int(own.behind), int(own.moves)], WHAT)
    source, wanted = sources[0], rows[sources[0]][:-2]
    rest: Mapping[str, Any] = {name: state.rest for name, state in held.items()}
    found, takes = Received(digests=wanted), own.behind and digests != wanted
    if any(row[-2] and row[:-2] != wanted for row in rows):  # not where they have equal bits by chance, as at the start
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
    """Compare what ranks have now with what the sources had. All ranks call it."""
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
            f"rank {rank} has loaded the state of rank {sources[0]}, and {names} is not equal to it in bits "
            f"afterwards: its load_state_dict() must restore all that its state_dict() returns"
        )
    if received.sums is not None:
        check_sums(group, received.sums, sums_of(now), declared.due.shards)


def check_parameters(group: Group, declared: Declared) -> None:
    """Raise ReplicasDiffer on all ranks unless parameters that are whole on all of them have the same bits there."""
    params = declared.whole_parameters()
    rows = gather_bytes(group, json.dumps(digests_of([param for _, param in params])).encode(), WHAT)
    if wrong := next((rank for rank, row in enumerate(rows) if row != rows[0]), None):
        pairs = zip(json.loads(rows[0]), json.loads(rows[wrong]), params, strict=True)
        name = next(name for one, other, (name, _) in pairs if one != other)
        raise ReplicasDiffer(
            f"ranks have gathered the parameters anew from those who own them, and {name} differs between rank 0 and "
            f"rank {wrong}: test the memory and the network of these machines"
        )
