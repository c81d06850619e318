"""Which errors end an attempt and not the job: those that say that other ranks are gone, or are wrong, and those that
all ranks have together in a step that may well succeed when it is made again.
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
NEWS_S = 1.0  # an error of torch's own may be older than the launcher's word that a member is gone


class Answer(Enum):
    """What a rank does about an error that has ended its attempt."""

    GO_ON = auto()  # without those that are gone
    TRY_AGAIN = auto()  # with the same ranks; the launcher counts how often
    GO_BACK = auto()  # with the same ranks, of whose states none can be trusted; the launcher counts that, too
    RAISE = auto()  # it is the error of this rank


def answer(error: BaseException, rank: int, generations: Generations) -> Answer:
    """What is to be done about an error, by the rank that has this number in its generation."""
    if isinstance(error, MessageDamaged):
        return Answer.TRY_AGAIN
    if isinstance(error, WrongGradients | ReplicaDrift):  # all ranks have it; those at fault leave, and are replaced
        if error.known:
            return Answer.RAISE if rank in error.ranks else Answer.GO_ON
        return Answer.TRY_AGAIN if isinstance(error, WrongGradients) else Answer.GO_BACK
    return Answer.GO_ON if _follows_loss(error, generations) else Answer.RAISE


def _follows_loss(error: BaseException, generations: Generations) -> bool:
    """Whether an error is about ranks that this one has lost, and no fault of its script."""
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
    """One line on what has ended an attempt of `step`, in which this rank stood at `mark`, and what comes of it."""
    if found is Answer.GO_BACK:
        return f"{type(error).__name__}: {error}; no rank is known to be right, so all go back to the newest checkpoint"
    after = {
        StepMark.ATTEMPTING: f"step {step} is dropped and made again",
        StepMark.WHOLE: f"{step} steps were committed before that",
        StepMark.UPDATING: f"the update of step {step} was broken off, so all state is taken from another rank",
    }.get(mark, "")
    return f"{type(error).__name__}: {error}; {after}"


def _of_backend(error: BaseException) -> bool:
    """Whether an error comes from torch's process groups, which name no rank."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "nccl" in str(error).lower()
