"""Every exception that paceline raises on purpose.

PacelineError
├── UsageError            (ValueError)    an argument that cannot work, before anything was started
├── IllegalMove           (RuntimeError)  a call that the current state does not allow
├── WorldError            (RuntimeError)  the launcher's environment is incomplete or contradicts itself
│   └── WorldNotFormed    (TimeoutError)  some ranks never arrived; `missing` names them
├── ModelMismatch         (RuntimeError)  ranks wrapped different models
├── ReplicasDiffer        (ValueError)    init="verify" found unequal values
├── ReplicaDrift          (RuntimeError)  replicas were equal once and are not any more; `ranks`, `tensor`, `step`
│   └── NoMajority                        it cannot be healed, because it is not known which rank is right
├── WrongGradients        (RuntimeError)  a lane has other gradients when another rank computes it; `ranks`, `lane`, …
├── CollectiveError       (RuntimeError)  something went wrong between ranks
│   ├── PeerLost                          a rank died; `ranks` names it
│   ├── PeerAbsent        (TimeoutError)  a rank did not come before `timeout=`
│   ├── BackwardAborted                   the backward ended with an exception on another rank
│   ├── MessageDamaged                    what a rank has sent is not what came to another
│   └── CollectiveMismatch                ranks issued different collectives
├── BucketsTooLarge       (MemoryError)   there is not enough memory for the gradients
├── SharedMemoryFull      (MemoryError)   there is not enough memory for what ranks of one host share
├── UnusedParameters      (RuntimeError)  unused="error" and a parameter took no part in a backward
├── GraphChanged          (RuntimeError)  static_graph=True and the graph is not static
├── UnreducedGradients    (RuntimeError)  an optimizer step on gradients that were never reduced
├── NotWhole              (RuntimeError)  a whole tensor was asked for where ranks hold it in shards
├── NotFiniteGradients    (ArithmeticError)  gradients are not finite, and not_finite= says that this is an error
├── CheckpointError                       its kinds stand in `checkpoint/checkpoint_errors.py`
├── Malformed             (ValueError)    what came from a file or another process is nothing that paceline writes
├── CapsuleDamaged        (ValueError)    a file is no whole failure capsule
├── DataDiffers           (ValueError)    ranks were given different data: `data/rank_checks.py`
├── WorkerDied, SampleLogDamaged          of the loader: `data/workers.py`, `data/sample_log.py`
├── PlanError, ConfigError, CorpusError (ValueError)  a number or text that cannot be planned, trained with, trained on
└── LaunchError           (RuntimeError)  the ranks could not be started: `launch/job.py`

The builtin bases are those that torch raises in the same place, so `except` clauses written for torch keep working.
"""

from collections.abc import Sequence


class PacelineError(Exception):
    """Base of all errors that paceline raises on purpose."""


class UsageError(PacelineError, ValueError):
    """An argument that cannot work."""


class IllegalMove(PacelineError, RuntimeError):
    """A call that the current state does not allow."""


class WorldError(PacelineError, RuntimeError):
    """The launcher's environment is incomplete or contradicts itself."""


class WorldNotFormed(WorldError, TimeoutError):
    """Some ranks never arrived."""

    def __init__(self, message: str, *, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class ModelMismatch(PacelineError, RuntimeError):
    """Ranks wrapped models that differ in names, order, shapes, dtypes, strides or requires_grad."""


class ReplicasDiffer(PacelineError, ValueError):
    """Replicas were told to start equal (init="verify") and do not."""


class ReplicaDrift(PacelineError, RuntimeError):
    """Replicas were equal and are not any more. `ranks` are those at fault, which is `known` where a majority tells, or
    else all that differ."""

    def __init__(
        self, message: str, *, ranks: Sequence[int] = (), known: bool = False, tensor: str = "", step: int = -1
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.known = known
        self.tensor = tensor
        self.step = step


class NoMajority(ReplicaDrift):
    """Drift that cannot be healed: it is not known which rank is right."""


class WrongGradients(PacelineError, RuntimeError):
    """An audit has found a lane whose gradients another rank computes differently. `ranks` are those that compute
    wrong, or all that disagree where it is not `known` who is right; `tensor` is the first parameter that differs."""

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int] = (),
        known: bool = False,
        step: int = -1,
        lane: int = -1,
        tensor: str = "",
    ) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.known = known
        self.step = step
        self.lane = lane
        self.tensor = tensor


class NotFiniteGradients(PacelineError, ArithmeticError):
    """Gradients are not finite, and the batches of `ranks` made them so."""

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class Malformed(PacelineError, ValueError):
    """What a file, a pipe, a socket or a store holds is nothing that paceline writes there."""


class CapsuleDamaged(PacelineError, ValueError):
    """A file is not, byte for byte, a failure capsule as it was written."""


class CollectiveError(PacelineError, RuntimeError):
    """Something went wrong between ranks. `ranks` are those at fault, as far as they are known."""

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class PeerLost(CollectiveError):
    """A rank died while others needed it."""


class PeerAbsent(CollectiveError, TimeoutError):
    """A rank is alive but did not come before the timeout."""


class BackwardAborted(CollectiveError):
    """The backward ended with an exception on another rank, so this step has no gradients."""


class MessageDamaged(CollectiveError):
    """What was received is not what was sent. `ranks` are the senders, and no rank has used it."""


class CollectiveMismatch(CollectiveError):
    """Ranks issued different collectives, or the same ones in different order."""


class BucketsTooLarge(PacelineError, MemoryError):
    """There is not enough memory for the buckets."""


class SharedMemoryFull(PacelineError, MemoryError):
    """There is not enough memory for what the ranks of one host share."""


class UnusedParameters(PacelineError, RuntimeError):
    """A parameter took no part in a backward, and the replica was told to refuse that."""


class GraphChanged(PacelineError, RuntimeError):
    """The graph was declared static and changed."""


class UnreducedGradients(PacelineError, RuntimeError):
    """An optimizer was about to step on gradients that were never reduced."""


class NotWhole(PacelineError, RuntimeError):
    """A whole gradient or parameter was asked for, and under this placement no rank has one."""
