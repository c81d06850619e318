"""`paceline.ray.run`: a job on a Ray cluster, for a script that drives others."""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.launch import ElasticTerms, Fold, Job, JobOutcome, Listener, spans, supervise
from paceline.ray.cluster_engine import ray_engine


def run(
    command: Sequence[str],
    *,
    ranks: int | tuple[int, int],
    spares: int = 0,
    max_losses: int | None = None,
    cpus_per_rank: float = 1.0,
    gpus_per_rank: float | None = None,
    max_restarts: int = 0,
    environment: Mapping[str, str] | None = None,
    run_dir: str | Path | None = None,
    listener: Listener | None = None,
) -> JobOutcome:
    """Run a script on ranks that Ray places, and return how that ended.

    `command` is a script of Python and its arguments. `ranks` are as many, or, for a script with `paceline.Elastic`,
    between a minimum and a maximum, and then lost ranks are replaced while the others go on; `spares` and `max_losses`
    are as in `paceline run`. The cluster is the one that this process is connected to, or that
    of RAY_ADDRESS, or one that was started on this machine; without any, a new one of this machine alone. `environment`
    is added to what Ray gives processes; logs go to `run_dir`. Output is printed, each line with its rank, unless a
    `listener` takes it. When this process dies, the ranks do too.
    """
    folder = Path(run_dir) if run_dir is not None else Path("runs") / time.strftime("ray-%Y%m%d-%H%M%S")
    minimum, maximum = ranks if isinstance(ranks, tuple) else (ranks, ranks)
    terms = ElasticTerms(minimum=minimum, maximum=maximum, spares=spares, max_losses=max_losses)
    job = Job(
        command=(sys.executable, "-u", *command),
        ranks=maximum,
        elastic=terms if isinstance(ranks, tuple) else None,
        run_dir=folder,
        max_restarts=max_restarts,
        environment=environment or {},
    )
    shown = _Printed(job.slots) if listener is None else listener
    with ray_engine(job, shown.note, cpus_per_rank=cpus_per_rank, gpus_per_rank=gpus_per_rank) as engine:
        outcome = supervise(job, shown, engine)
    if isinstance(shown, _Printed):
        shown.conclude(outcome)
    return outcome


class _Printed(Listener):
    """Prints what ranks write, equal lines of several ranks once."""

    def __init__(self, ranks: int) -> None:
        self._fold = Fold(self._print, ranks)

    def line(self, rank: int, text: str) -> None:
        self._fold.add(rank, text, time.monotonic())

    def note(self, text: str) -> None:
        sys.stderr.write(f"paceline: {text}\n")

    def tick(self) -> None:
        self._fold.flush(time.monotonic())

    def conclude(self, outcome: JobOutcome) -> None:
        self._fold.flush(float("inf"))
        if outcome.failure is not None:
            self.note("\n".join(outcome.failure.lines()))

    def _print(self, ranks: tuple[int, ...], text: str) -> None:
        sys.stdout.write(f"[{spans(ranks)}] {text}\n")
        sys.stdout.flush()
