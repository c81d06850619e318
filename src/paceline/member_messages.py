"""The messages between members of an elastic job and their launcher: one JSON object per line, each a frozen dataclass.

A member is a process; its number is never reused. A generation is one membership of the world: an ordered
list of members, in which a member's position is its rank.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

LOOPBACK = "127.0.0.1"
NEVER = -1  # the generation, or the step, of a member that has been in none
MAX_REASON = 600  # so that a line stays within 4 KiB, whatever characters it holds

# From members --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemberReady:
    """A member waits for the next generation. `was` is the one it has left. `whole`: it holds the complete state of
    `step` or, if states are cut into `shards`, the complete shard number `shard` of it.

    The script accepts worlds whose size is a multiple of `multiple` and, unless `divides` is 0, a divisor of it.
    `reason`, which continues "rank 1 ", says what ended the last generation on all ranks if none is to blame.
    """

    was: int
    step: int
    whole: bool
    reason: str = ""
    shards: int = 1
    shard: int = 0
    multiple: int = 1
    divides: int = 0


@dataclass(frozen=True)
class MemberStore:
    """The first member of a generation runs its store, which listens here."""

    generation: int
    port: int
    host: str = LOOPBACK


@dataclass(frozen=True)
class MemberFormed:
    """A member has formed the group of a generation, and its state is equal to the source's."""

    generation: int


@dataclass(frozen=True)
class MemberFailed:
    """The member's script raised an exception that no other member caused, and the member is about to leave."""

    generation: int
    step: int
    reason: str


@dataclass(frozen=True)
class MemberFinished:
    """All members have reached the end of training. From now on no member is replaced."""

    generation: int
    step: int


# From the launcher --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generation:
    """The next membership. `sources` have the state of `step` between them, each the shard of its position; a state
    that is not cut has one source. The launcher alone decides whose state is used.

    Without sources no state is whole, and the newest checkpoint has to be loaded. `fresh`: no member has trained yet,
    so a checkpoint, if there is one, is tried first.
    """

    number: int
    members: tuple[int, ...]
    sources: tuple[int, ...]
    step: int
    fresh: bool

    @property
    def size(self) -> int:
        return len(self.members)

    def rank_of(self, member: int) -> int:
        """The rank of a member."""
        return self.members.index(member)


@dataclass(frozen=True)
class StoreAt:
    """Where the store of a generation listens."""

    generation: int
    host: str
    port: int


@dataclass(frozen=True)
class MemberLeft:
    """A member has left a generation, which ends it. `reason` continues "rank 1 "."""

    generation: int
    member: int
    reason: str


@dataclass(frozen=True)
class Regroup:
    """Members wait to join: leave this generation together, after the same step."""

    generation: int


@dataclass(frozen=True)
class Refused:
    """No generation can be formed any more."""

    reason: str


@dataclass(frozen=True)
class Finished:
    """Training is over: a member of this generation has passed the last barrier, so all have reached it."""

    generation: int


FromMember = MemberReady | MemberStore | MemberFormed | MemberFailed | MemberFinished
FromLauncher = Generation | StoreAt | MemberLeft | Regroup | Refused | Finished
_KINDS: Mapping[type[Any], str] = {
    MemberReady: "member_ready",
    MemberStore: "member_store",
    MemberFormed: "member_formed",
    MemberFailed: "member_failed",
    MemberFinished: "member_finished",
    Generation: "generation",
    StoreAt: "store",
    MemberLeft: "ended",
    Regroup: "regroup",
    Refused: "refused",
    Finished: "finished",
}


def to_line(message: FromMember | FromLauncher) -> bytes:
    """A message as a line, with the newline."""
    found = {"kind": _KINDS[type(message)], **asdict(message)}
    if "reason" in found:
        found["reason"] = found["reason"][:MAX_REASON]
    return json.dumps(found).encode() + b"\n"


def from_member(kind: str, said: Mapping[str, Any]) -> FromMember | None:
    """The message in a member's report; None if the report is of another kind or malformed."""
    found: FromMember | None = _read(kind, said, MemberReady, MemberStore, MemberFormed, MemberFailed, MemberFinished)
    return found


def from_launcher(line: bytes) -> FromLauncher | None:
    """The launcher's message in a line; None if it is malformed."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    kind = str(said.pop("kind", ""))
    found: FromLauncher | None = _read(kind, said, Generation, StoreAt, MemberLeft, Regroup, Refused, Finished)
    return found


def _read(kind: str, said: Mapping[str, Any], *allowed: type[Any]) -> Any:
    found = next((known for known in allowed if _KINDS[known] == kind), None)
    if found is None or said.keys() != {field.name for field in fields(found)}:
        return None
    values = {field.name: _value(said[field.name], field.type) for field in fields(found)}
    wrong = any(value is _WRONG or not _fits(name, value) for name, value in values.items())
    return None if wrong else found(**values)


_WRONG = object()


# The range of these numbers; all others may be as low as NEVER.
_LIMITS = {"port": (1, 65535), "shards": (1, 1 << 31), "multiple": (1, 1 << 31), "divides": (0, 1 << 31)}
_ANY = (NEVER, 1 << 62)


def _fits(name: str, value: Any) -> bool:
    low, high = _LIMITS.get(name, _ANY)
    numbers = value if isinstance(value, tuple) else (value,) if type(value) is int else ()
    return all(low <= number <= high for number in numbers)


def _value(value: Any, kind: Any) -> Any:
    if kind == tuple[int, ...]:
        fits = isinstance(value, list) and all(type(part) is int for part in value)
        return tuple(value) if fits else _WRONG
    return value if type(value) is kind else _WRONG
