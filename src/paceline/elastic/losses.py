"""Classify errors: which of them end an attempt and not the job. These are errors that say that other ranks are lost or
wrong, and errors that all ranks raise together in a step that may well succeed when it is repeated.
"""

import time
from enum import Enum, auto

import torch.distributed as dist

from paceline.elastic.generations import Generations
from paceline.elastic.transaction import StepMark
from paceline.errors import (
    BackwardAborted,
    CollectiveError,
    MessageDamaged,
    PacelineError,
    PeerAbsent,
    PeerLost,
    ReplicaDrift,
    WrongGradients,
)

LOSSES = (PeerLost, PeerAbsent, BackwardAborted)
NEWS_S = 1.0  # torch's error may come before the launcher's message that a member has died


class Answer(Enum):
    """What a rank does about an error that ended its attempt."""

    GO_ON = auto()  # without the lost ranks
    TRY_AGAIN = auto()  # with the same ranks; the launcher counts how often
    GO_BACK = auto()  # with the same ranks, none of whose states can be trusted; the launcher counts that, too
    RAISE = auto()  # it is the error of this rank


def answer(error: BaseException, rank: int, generations: Generations) -> Answer:
    """What the given rank of the current generation does about an error."""
    if isinstance(error, MessageDamaged):
        return Answer.TRY_AGAIN
    if isinstance(error, WrongGradients | ReplicaDrift):  # raised on all ranks; those at fault leave and are replaced
        if error.known:
            return Answer.RAISE if rank in error.ranks else Answer.GO_ON
        return Answer.TRY_AGAIN if isinstance(error, WrongGradients) else Answer.GO_BACK
    return Answer.GO_ON if _follows_loss(error, generations) else Answer.RAISE


def _follows_loss(error: BaseException, generations: Generations) -> bool:
    """Whether an error follows from the loss of other ranks, and is not a fault of the script."""
    if isinstance(error, LOSSES):
        return True
    if not isinstance(error, RuntimeError) or (
        isinstance(error, PacelineError) and not isinstance(error, CollectiveError)
    ):
        return False
    if isinstance(error, CollectiveError) or _of_backend(error):
        until = time.monotonic() + NEWS_S
        while not generations.over and time.monotonic() < until:
            time.sleep(0.01)
    return generations.over


def describe_loss(error: BaseException, step: int, mark: StepMark, found: Answer) -> str:
    """One line about the error that ended an attempt of `step`, with this rank at `mark`, and the consequence."""
    if found is Answer.GO_BACK:
        return f"{type(error).__name__}: {error}; no rank is known to be right, so all return to the newest checkpoint"
    after = {
        StepMark.ATTEMPTING: f"step {step} is dropped and repeated",
        StepMark.WHOLE: f"{step} steps were committed before that",
        StepMark.UPDATING: f"the update of step {step} was interrupted, so all state is taken from another rank",
    }.get(mark, "")
    return f"{type(error).__name__}: {error}; {after}"


def _of_backend(error: BaseException) -> bool:
    """Whether an error comes from torch's process groups, which name no rank."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "nccl" in str(error).lower()
