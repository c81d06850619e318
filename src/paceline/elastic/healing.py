"""How the ranks of a new generation that do not have the state that it goes on from get it: in one piece.

The launcher says whose state that is (`launch/next_generation.py`). Survivors that are all whole at one step have it
already, and no bytes move. Otherwise all that are behind, torn or new take everything from one rank. Never a part of
it: ranks that were healed tensor by tensor have ended in a state that no run has been in.
"""

import torch

from paceline.collectives.gather import gather_bytes, gather_ints, gather_unless_equal
from paceline.collectives.group import Group
from paceline.elastic.declared import Declared
from paceline.errors import ReplicasDiffer, UsageError
from paceline.stored.packed import pack, unpack

WHAT = "the comparison of states"


def compare_declared(group: Group, declared: Declared, *, behind: bool) -> list[bool]:
    """Which ranks are behind. All of them call it. Raises UsageError on all if they have declared different things."""
    rows = gather_ints(group, [int(behind), declared.signature()], WHAT)
    if len({signature for _, signature in rows}) > 1:
        told = gather_unless_equal(group, {name: type(t).__name__ for name, t in declared.things.items()}, WHAT)
        raise UsageError(f"ranks have declared different things to paceline.Elastic: {told}; declare the same on all")
    return [bool(is_behind) for is_behind, _ in rows]


def heal(group: Group, declared: Declared, source: int, *, behind: bool) -> bool:
    """Have the ranks that are `behind` take everything from `source`. All ranks call it. Returns whether this one has
    taken anything: not where it has equal bits by chance, as ranks have that started from one seed."""
    own = declared.digests()
    rows = gather_ints(group, [*own.values(), int(behind)], WHAT)
    wanted = rows[source][:-1]
    if not any(row[-1] and row[:-1] != wanted for row in rows):
        return False
    takes = behind and list(own.values()) != wanted
    blob = _broadcast(group, pack(declared.state(), "state") if group.rank == source else b"", source)
    if takes:
        declared.take(unpack(blob))
    found = list(declared.digests().values()) if takes else wanted
    problems = [name for name, value, right in zip(own, found, wanted, strict=True) if value != right]
    told = gather_bytes(group, ", ".join(problems).encode(), WHAT)
    if wrong := [(rank, names.decode()) for rank, names in enumerate(told) if names]:
        rank, names = wrong[0]
        raise ReplicasDiffer(
            f"rank {rank} has loaded the state of rank {source}, and {names} is not equal to it in bits afterwards: "
            f"its load_state_dict() must restore all that its state_dict() returns"
        )
    return takes


def _broadcast(group: Group, blob: bytes, source: int) -> torch.Tensor:
    """The bytes of one rank, on all of them."""
    length = gather_ints(group, [len(blob)], WHAT)[source][0]
    if group.rank == source:
        flat = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
    else:
        flat = torch.empty(length, dtype=torch.uint8, device="cpu")
    group.wait(group.transport.broadcast(flat, source), f"the state of rank {source}")
    return flat
