"""Ray as the engine of a job: it places ranks on the machines of a cluster, and places lost ones again."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.launch import Job, Processes
from paceline.ray.cluster import connected

if TYPE_CHECKING:
    from paceline.ray.places import Places


class RayEngine:
    """Ranks run where the agents of `places` are."""

    def __init__(self, places: "Places", note: Callable[[str], None]) -> None:
        self._places = places
        self._note = note

    @property
    def environment(self) -> Mapping[str, str]:
        """Only paceline's variables of this process: another machine has other paths, and its own variables."""
        ours = {name: value for name, value in os.environ.items() if name.startswith("PACELINE_")}
        return {"OMP_NUM_THREADS": str(max(1, int(self._places.needs.cpus))), **ours}

    def open(self) -> Processes:
        """Begin an attempt: agents are placed as ranks are started."""
        from paceline.ray.remote_processes import RemoteProcesses

        return RemoteProcesses(self._places, self._note)


@contextmanager
def ray_engine(
    job: Job, note: Callable[[str], None], *, cpus_per_rank: float = 1.0, gpus_per_rank: float | None = None
) -> Iterator[RayEngine]:
    """The engine of a job. `note` receives messages. Without `gpus_per_rank`, each rank has a GPU if the
    cluster has any."""
    if job.gpu_ids is not None:
        raise UsageError("Ray chooses the GPUs of ranks: leave gpu_ids out, and say how many each rank needs")
    together = job.ranks if job.elastic is None else job.elastic.minimum
    with connected(job.slots) as new:
        import ray

        from paceline.ray.places import Needs, Places

        if gpus_per_rank is None:
            gpus_per_rank = 1.0 if ray.cluster_resources().get("GPU") else 0.0
        places = Places(together, Needs(cpus_per_rank, gpus_per_rank))
        if new:
            note("no Ray cluster was found, so one of this machine alone is started for this job")
        try:
            yield RayEngine(places, note)
        finally:
            places.close()
