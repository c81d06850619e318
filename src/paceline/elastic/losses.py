"""Which errors end an attempt and not the job: those that say that other ranks are gone."""

import time

import torch.distributed as dist

from paceline.elastic.generations import Generations
from paceline.elastic.transaction import StepMark
from paceline.errors import BackwardAborted, CollectiveError, PacelineError, PeerAbsent, PeerLost

LOSSES = (PeerLost, PeerAbsent, BackwardAborted)
NEWS_S = 1.0  # an error of torch's own may be older than the launcher's word that a member is gone


def follows_loss(error: BaseException, generations: Generations) -> bool:
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


def describe_loss(error: BaseException, step: int, mark: StepMark) -> str:
    """One line on what has ended an attempt of `step`, in which this rank stood at `mark`."""
    after = {
        StepMark.ATTEMPTING: f"step {step} is dropped and made again",
        StepMark.WHOLE: f"{step} steps were committed before that",
        StepMark.UPDATING: f"the update of step {step} was broken off, so all state is taken from another rank",
    }.get(mark, "")
    return f"{type(error).__name__}: {error}; {after}"


def _of_backend(error: BaseException) -> bool:
    """Whether an error comes from torch's process groups, which name no rank."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "nccl" in str(error).lower()
