"""Every exception that paceline raises on purpose.

PacelineError
├── UsageError            (ValueError)    an invalid argument, found before anything was started
├── IllegalMove           (RuntimeError)  a call that the current state does not allow
├── WorldError            (RuntimeError)  the launcher's environment is incomplete or contradicts itself
│   └── WorldNotFormed    (TimeoutError)  some ranks never arrived; `missing` names them
├── ModelMismatch         (RuntimeError)  ranks wrapped different models
├── ReplicasDiffer        (ValueError)    init="verify" found unequal values
├── ReplicaDrift          (RuntimeError)  replicas were equal once and are not any more; `ranks`, `tensor`, `step`
│   └── NoMajority                        it cannot be healed, because it is not known which rank is right
├── WrongGradients        (RuntimeError)  another rank computes other gradients for the same lane; `ranks`, `lane`, …
├── CollectiveError       (RuntimeError)  something went wrong between ranks
│   ├── PeerLost                          a rank died; `ranks` names it
│   ├── PeerAbsent        (TimeoutError)  a rank did not join the collective within `timeout=`
│   ├── BackwardAborted                   the backward ended with an exception on another rank
│   ├── MessageDamaged                    a message arrived with other contents than were sent
│   └── CollectiveMismatch                ranks issued different collectives
├── BucketsTooLarge       (MemoryError)   there is not enough memory for the gradients
├── SharedMemoryFull      (MemoryError)   there is not enough memory for what ranks of one host share
├── UnusedParameters      (RuntimeError)  unused="error" and a parameter took no part in a backward
├── GraphChanged          (RuntimeError)  static_graph=True and the graph is not static
├── UnreducedGradients    (RuntimeError)  an optimizer step on gradients that were never reduced
├── NotWhole              (RuntimeError)  a whole tensor was requested, but ranks hold it in shards
├── NotFiniteGradients    (ArithmeticError)  gradients are not finite, and not_finite= says that this is an error
├── CheckpointError                       subclasses: `checkpoint/checkpoint_errors.py`
├── Malformed             (ValueError)    data from a file or another process is not in paceline's format
├── CapsuleDamaged        (ValueError)    a file is not an intact failure capsule
├── DataDiffers           (ValueError)    ranks were given different data: `data/rank_checks.py`
├── WorkerDied, SampleLogDamaged          of the loader: `data/workers.py`, `data/sample_log.py`
├── PlanError, ConfigError, CorpusError (ValueError)  invalid input of `plan`, a setting, a corpus
└── LaunchError           (RuntimeError)  the ranks could not be started: `launch/job.py`

The builtin bases are those that torch raises in the same place, so `except` clauses written for torch keep working.
"""

from collections.abc import Sequence


class PacelineError(Exception):
    """Base of all errors that paceline raises on purpose."""


class UsageError(PacelineError, ValueError):
    """An invalid argument."""


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
    """Replicas were required to start equal (init="verify") and differ."""


class ReplicaDrift(PacelineError, RuntimeError):
    """Replicas were equal and no longer are. `ranks` are those at fault if a majority shows which (`known`), else all
    that differ."""

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
    wrong results, or, if `known` is false, all that disagree; `tensor` is the first parameter that differs."""

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
    """The contents of a file, pipe, socket or store are not in the format that paceline writes there."""


class CapsuleDamaged(PacelineError, ValueError):
    """A failure capsule is damaged, or the file is not a failure capsule."""


class CollectiveError(PacelineError, RuntimeError):
    """A collective failed. `ranks` are those at fault, as far as they are known."""

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class PeerLost(CollectiveError):
    """A rank died while others needed it."""


class PeerAbsent(CollectiveError, TimeoutError):
    """A rank is alive but did not join the collective before the timeout."""


class BackwardAborted(CollectiveError):
    """The backward ended with an exception on another rank, so this step has no gradients."""


class MessageDamaged(CollectiveError):
    """A message was damaged on its way. `ranks` are the senders; no rank has used the data."""


class CollectiveMismatch(CollectiveError):
    """Ranks issued different collectives, or the same ones in different order."""


class BucketsTooLarge(PacelineError, MemoryError):
    """There is not enough memory for the buckets."""


class SharedMemoryFull(PacelineError, MemoryError):
    """There is not enough memory for the shared memory of the ranks of one host."""


class UnusedParameters(PacelineError, RuntimeError):
    """A parameter took no part in a backward, and the replica was told to refuse that."""


class GraphChanged(PacelineError, RuntimeError):
    """The graph was declared static and changed."""


class UnreducedGradients(PacelineError, RuntimeError):
    """An optimizer was about to step on gradients that were never reduced."""


class NotWhole(PacelineError, RuntimeError):
    """A whole gradient or parameter was requested, but under this placement no rank holds one."""
