"""The events and actions of the coordinator of an elastic job."""

from dataclasses import dataclass

from paceline.member_messages import FromLauncher, Generation


@dataclass(frozen=True)
class Departure:
    """How the process of a member ended. `cause` continues "rank 1 "; `step` is the last one that it noted.

    `from_outside` says that it was killed and is not the cause itself. `asked`: the whole job was asked to end, and the
    process did, so it was not lost.
    """

    cause: str
    step: int
    from_outside: bool = False
    asked: bool = False


@dataclass(frozen=True)
class Loss:
    """A member that left before training was finished. `rank` is its last one, or NEVER."""

    member: int
    slot: int
    rank: int
    step: int
    cause: str


@dataclass(frozen=True)
class Spawn:
    """Start a process in a slot, as this member."""

    slot: int
    member: int


@dataclass(frozen=True)
class Tell:
    """Tell a member something."""

    member: int
    message: FromLauncher


@dataclass(frozen=True)
class EndMember:
    """Ask a member's process to end, and kill it if it does not."""

    member: int


@dataclass(frozen=True)
class Lost:
    """Report: a member was lost."""

    loss: Loss


@dataclass(frozen=True)
class Formed:
    """Report: all members have formed a generation; `joined` of them were not in the previous one.

    `took_s` is the time since that one ended.
    """

    generation: Generation
    joined: int
    took_s: float


@dataclass(frozen=True)
class Waiting:
    """Report: what the job waits for."""

    text: str


@dataclass(frozen=True)
class GiveUp:
    """The job cannot go on. `final`: a restart would end in the same way."""

    reason: str
    final: bool = False


Action = Spawn | Tell | EndMember | Lost | Formed | Waiting | GiveUp
