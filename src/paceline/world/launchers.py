"""One small function per launcher: the world that its variables describe, or None if they are not set.

`ORDER` is the order in which they are tried. The first complete set wins.
"""

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import WorldError
from paceline.typed_json import read_json, shown, typed
from paceline.world.environment import DEFAULT_PORT, Variables, is_loopback, node_of
from paceline.world.world import World

_TF_CONFIG: Any = dict[str, dict[str, Any]]
_HOSTS: Any = list[str]


def _world(
    env: Variables,
    source: str,
    rank: int,
    size: int,
    local: tuple[int, int] = (0, 1),
    *,
    node_rank: int | None = None,
    host: str = "",
    port: int = DEFAULT_PORT,
) -> World:
    """`local` is the rank and the size on this machine. MASTER_ADDR and MASTER_PORT win over `host` and `port`."""
    return World(
        rank=rank,
        size=size,
        local_rank=local[0],
        local_size=local[1],
        node_rank=node_of(rank, *local) if node_rank is None else node_rank,
        master_addr=env.text("MASTER_ADDR") or host,
        master_port=env.port("MASTER_PORT", port),
        source=source,
    )


def from_torchrun(env: Variables) -> World | None:
    """RANK and WORLD_SIZE: torchrun, Kubeflow's PyTorchJob, `paceline run`, and users who set them by hand."""
    if not env.has("RANK", "WORLD_SIZE"):
        return None
    rank, size = env.rank_and_size("RANK", "WORLD_SIZE")
    # If the number of ranks on this machine is not given: a loopback address means that all of them are.
    local = (rank, size) if is_loopback(env.text("MASTER_ADDR")) else (0, 1)
    return _with_local_variables(env, "RANK and WORLD_SIZE", rank, size, local)


def from_arguments(env: Variables, rank: int, size: int) -> World:
    """A rank that was passed to `World.from_env`; variables of torchrun's add the rest."""
    return _with_local_variables(env, "arguments", rank, size, (rank, size))


def _with_local_variables(env: Variables, source: str, rank: int, size: int, default: tuple[int, int]) -> World:
    local = env.rank_and_size("LOCAL_RANK", "LOCAL_WORLD_SIZE", default)
    node_rank = env.integer(env.first("GROUP_RANK", "NODE_RANK"), node_of(rank, *local))
    return _world(env, source, rank, size, local, node_rank=node_rank, port=0)


def from_torchrun_settings(env: Variables) -> World | None:
    """PET_*: what torchrun itself would read. Enough for a process that is the only one of its node."""
    if not env.has("PET_NNODES", "PET_NODE_RANK"):
        return None
    per_node = env.text("PET_NPROC_PER_NODE") or "1"
    if per_node != "1" and not (env.has("LOCAL_RANK") and re.fullmatch("[0-9]{1,9}", per_node)):
        raise WorldError(
            f"PET_NPROC_PER_NODE={per_node!r} asks for several processes per node, but nothing says which of them "
            f"this one is: expected LOCAL_RANK, got none; start the script with torchrun or `paceline run`"
        )
    endpoint, _, endpoint_port = env.text("PET_RDZV_ENDPOINT").rpartition(":")
    host = env.text("PET_MASTER_ADDR") or endpoint
    endpoint_has_port = re.fullmatch("[0-9]{1,5}", endpoint_port) is not None
    port = env.port("PET_MASTER_PORT", int(endpoint_port) if endpoint_has_port else DEFAULT_PORT)
    node = env.rank_and_size("PET_NODE_RANK", "PET_NNODES")
    return _in_blocks(
        env, "PET_*, torchrun's own settings", node, (env.integer("LOCAL_RANK", 0), int(per_node)), host, port
    )


def from_skypilot(env: Variables) -> World | None:
    """SKYPILOT_*: the task's command runs once per node, so this process is alone there unless LOCAL_RANK is set."""
    if not env.has("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"):
        return None
    node = env.rank_and_size("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES")
    local = (0, 1)
    if env.has("LOCAL_RANK"):
        local = env.rank_and_size("LOCAL_RANK", env.first("LOCAL_WORLD_SIZE", "SKYPILOT_NUM_GPUS_PER_NODE"))
    host = env.text("SKYPILOT_NODE_IPS").split("\n")[0].strip()
    return _in_blocks(env, "SkyPilot", node, local, host, DEFAULT_PORT)


def _in_blocks(
    env: Variables, source: str, node: tuple[int, int], local: tuple[int, int], host: str, port: int
) -> World:
    """The world of a process on node `node[0]` of `node[1]`, each of which runs equally many ranks."""
    rank, size = node[0] * local[1] + local[0], node[1] * local[1]
    return _world(env, source, rank, size, local, node_rank=node[0], host=host, port=port)


def from_slurm(env: Variables) -> World | None:
    """SLURM_*, as srun sets them for each task. A shell inside an allocation is not a task."""
    if not env.has("SLURM_PROCID", "SLURM_NTASKS") or env.text("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None
    rank, size = env.rank_and_size("SLURM_PROCID", "SLURM_NTASKS")
    nodes = env.integer(env.first("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), 1)
    local_rank = env.integer("SLURM_LOCALID", 0)
    # SLURM_NTASKS_PER_NODE exists only when the user asked for it; sizes may differ between nodes otherwise.
    per_node = env.integer("SLURM_NTASKS_PER_NODE", -(-size // max(1, nodes)))
    hosts = env.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    job_digits = re.sub(r"[^0-9]", "", env.text("SLURM_JOB_ID", "SLURM_JOBID"))[-4:] or "0"
    return _world(
        env,
        "Slurm",
        rank,
        size,
        (local_rank, max(1, local_rank + 1, min(per_node, size))),
        node_rank=env.integer("SLURM_NODEID", 0),
        host=_first_slurm_host(hosts),
        port=15000 + int(job_digits),
    )


def _first_slurm_host(nodelist: str) -> str:
    """`gpu[003-007,12],login1` → `gpu003`; `a1,b2` → `a1`."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\]([^,]*))?", nodelist)
    return "".join(part or "" for part in found.groups()) if found else ""


def _names(prefix: str) -> tuple[str, str, str, str]:
    return f"{prefix}_RANK", f"{prefix}_SIZE", f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE"


# Rank, size, local rank, local size. PMIX_RANK comes with Open MPI's size, or with Slurm, which is tried before.
_MPI_NAMES = {
    "Open MPI": _names("OMPI_COMM_WORLD"),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "PMIx": ("PMIX_RANK", *_names("OMPI_COMM_WORLD")[1:]),
    "MVAPICH": _names("MV2_COMM_WORLD"),
}


def from_mpi(env: Variables) -> World | None:
    """Open MPI, PMI (MPICH, Intel MPI), PMIx, MVAPICH. None of them names the host of rank 0."""
    for source, (rank_name, size_name, local_rank_name, local_size_name) in _MPI_NAMES.items():
        if env.has(rank_name, size_name):
            rank, size = env.rank_and_size(rank_name, size_name)
            local = env.rank_and_size(local_rank_name, local_size_name, (0, 1))
            host = "127.0.0.1" if local[1] == size else next(iter(_pbs_hosts(env)), "")
            return _world(env, source, rank, size, local, host=host)
    return None


def from_lsf(env: Variables) -> World | None:
    """JSM_NAMESPACE_*, as jsrun sets them under LSF."""
    rank_name, size_name, local_rank_name, local_size_name = _names("JSM_NAMESPACE")
    if not env.has(rank_name, size_name):
        return None
    # The first line of the rank file is the batch node, which runs no rank.
    hosts = _lines(env.text("LSB_DJOB_RANKFILE"))[1:] or env.text("LSB_HOSTS").split()[1:]
    return _world(
        env,
        "LSF",
        *env.rank_and_size(rank_name, size_name),
        env.rank_and_size(local_rank_name, local_size_name, (0, 1)),
        host=next(iter(hosts), ""),
        port=10000 + env.integer("LSB_JOBID", 0) % 1000,
    )


def from_pbs(env: Variables) -> World | None:
    """PBS_NODEFILE: one process on each host of the job, in the order of the file."""
    hosts = list(dict.fromkeys(_pbs_hosts(env)))
    if not hosts:
        return None
    own = socket.gethostname()
    by_name = [index for index, host in enumerate(hosts) if host.split(".")[0] == own.split(".")[0]]
    if len(hosts) > 1 and not by_name:
        raise WorldError(
            f"PBS_NODEFILE lists {', '.join(hosts)}, but this host is {own}: expected it in the list; "
            f"start the ranks with mpiexec, or set RANK and WORLD_SIZE"
        )
    return _world(env, "PBS_NODEFILE", by_name[0] if by_name else 0, len(hosts), host=hosts[0])


def _pbs_hosts(env: Variables) -> list[str]:
    return _lines(env.text("PBS_NODEFILE"))


def _lines(path: str) -> list[str]:
    if not path:
        return []
    try:
        return Path(path).read_text().split()
    except (OSError, ValueError) as error:  # there is no such file, it is no text, or the name is none
        reason = getattr(error, "strerror", None) or error
        raise WorldError(f"the scheduler's host file {path!r} cannot be read: {reason}") from error


def from_tf_config(env: Variables) -> World | None:
    """TF_CONFIG: the cluster as TensorFlow writes it. The chief is rank 0, workers follow."""
    if not env.has("TF_CONFIG"):
        return None
    try:
        config = read_json(_TF_CONFIG, env.text("TF_CONFIG"), "a table with cluster and task")
        task = config["task"]
        cluster = {kind: typed(_HOSTS, config["cluster"].get(kind, []), "hosts") for kind in ("chief", "worker")}
        ranks = [(kind, index) for kind, hosts in cluster.items() for index in range(len(hosts))]
        hosts = [cluster[kind][index].rpartition(":") for kind, index in ranks]
        rank = ranks.index((task["type"], int(task["index"])))
        port = int(hosts[0][2])
        if not 0 < port < 65536:
            raise ValueError(f"{port} is not a TCP port")
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise WorldError(
            f"TF_CONFIG={shown(env.text('TF_CONFIG'))!r} names no training rank ({type(error).__name__}: {error}): "
            f"expected 'cluster' with chief and worker lists of host:port and a 'task' of one of them"
        ) from error
    same_host = [index for index, host in enumerate(hosts) if host[0] == hosts[rank][0]]
    nodes = list(dict.fromkeys(host[0] for host in hosts))
    return World(
        rank=rank,
        size=len(ranks),
        local_rank=same_host.index(rank),
        local_size=len(same_host),
        node_rank=nodes.index(hosts[rank][0]),
        master_addr=hosts[0][0],
        master_port=port,
        source="TF_CONFIG",
    )


ORDER: tuple[Callable[[Variables], World | None], ...] = (
    from_torchrun,
    from_torchrun_settings,
    from_slurm,
    from_skypilot,
    from_mpi,
    from_lsf,
    from_pbs,
    from_tf_config,
)

# When no set is complete, half of one of these means a broken launch, not a process on its own.
_HALVES = (("RANK", "WORLD_SIZE"), *(_MPI_NAMES[source][:2] for source in ("Open MPI", "PMI")))


def read_world(env: Variables) -> World:
    """What the environment says: the first complete set, or a world of one when there is none."""
    for read in ORDER:
        found = read(env)
        if found is not None:
            return found
    for pair in _HALVES:
        given = [name for name in pair if env.has(name)]
        if given:
            (missing,) = set(pair) - set(given)
            raise WorldError(
                f"{given[0]}={env.text(given[0])} is set but {missing} is not: expected both or neither; "
                f"start the script with torchrun or `paceline run`, or unset {given[0]}"
            )
    return World(source="a single process: no launcher's variables were found")
