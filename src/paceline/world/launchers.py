"""One small function for each launcher: what its variables say about this process, or None when it is not there.

`ORDER` is the order in which they are asked. The first complete set wins.
"""

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import WorldError
from paceline.world.environment import DEFAULT_PORT, Place, Variables, is_loopback, node_of


def from_torchrun(env: Variables) -> Place | None:
    """RANK and WORLD_SIZE: torchrun, Kubeflow's PyTorchJob, `paceline run`, and anyone who sets them by hand."""
    if not env.has("RANK", "WORLD_SIZE"):
        return None
    rank, size = env.seat("RANK", "WORLD_SIZE")
    address = env.text("MASTER_ADDR")
    if env.has("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        local_rank, local_size = env.seat("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif env.has("LOCAL_RANK") or is_loopback(address):
        # Nobody said how many ranks share this machine; a loopback address says that all of them do.
        local_rank = env.integer("LOCAL_RANK", rank)
        local_size = env.integer("LOCAL_WORLD_SIZE", size if is_loopback(address) else local_rank + 1)
    else:
        local_rank, local_size = 0, 1
    node_rank = env.integer(env.first("GROUP_RANK", "NODE_RANK"), node_of(rank, local_rank, local_size))
    port = env.port("MASTER_PORT")
    return Place(rank, size, local_rank, local_size, node_rank, address, port, "RANK and WORLD_SIZE")


def from_torchrun_settings(env: Variables) -> Place | None:
    """PET_*: what torchrun itself would read. Enough for a process that is the only one of its node."""
    if not env.has("PET_NNODES", "PET_NODE_RANK"):
        return None
    endpoint, _, endpoint_port = env.text("PET_RDZV_ENDPOINT").rpartition(":")
    per_node = env.text("PET_NPROC_PER_NODE") or "1"
    local = env.has("LOCAL_RANK") and per_node.isdigit()
    if per_node != "1" and not local:
        raise WorldError(
            f"PET_NPROC_PER_NODE={per_node!r} asks for several processes per node, but nothing says which of them "
            f"this one is: expected LOCAL_RANK, got none; start the script with torchrun or `paceline run`"
        )
    node_rank, nodes = env.seat("PET_NODE_RANK", "PET_NNODES")
    local_size = int(per_node)
    local_rank = env.integer("LOCAL_RANK", 0)
    return Place(
        rank=node_rank * local_size + local_rank,
        size=nodes * local_size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node_rank,
        master_addr=env.text("PET_MASTER_ADDR") or endpoint,
        master_port=env.port("PET_MASTER_PORT", int(endpoint_port) if endpoint_port.isdigit() else DEFAULT_PORT),
        source="PET_*, torchrun's own settings",
    )


def from_slurm(env: Variables) -> Place | None:
    """SLURM_*, as srun sets them for each task. A shell inside an allocation is not a task."""
    if not env.has("SLURM_PROCID", "SLURM_NTASKS") or env.text("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None
    rank, size = env.seat("SLURM_PROCID", "SLURM_NTASKS")
    nodes = env.integer(env.first("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), 1)
    local_rank = env.integer("SLURM_LOCALID", 0)
    # SLURM_NTASKS_PER_NODE exists only when the user asked for it; sizes may differ between nodes otherwise.
    per_node = env.integer("SLURM_NTASKS_PER_NODE", -(-size // max(1, nodes)))
    hosts = env.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    job_digits = re.sub(r"\D", "", env.text("SLURM_JOB_ID", "SLURM_JOBID"))[-4:] or "0"
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=max(1, local_rank + 1, min(per_node, size)),
        node_rank=env.integer("SLURM_NODEID", 0),
        master_addr=env.text("MASTER_ADDR") or _first_slurm_host(hosts),
        master_port=env.port("MASTER_PORT", 15000 + int(job_digits)),
        source="Slurm",
    )


def _first_slurm_host(nodelist: str) -> str:
    """`gpu[003-007,12],login1` → `gpu003`; `a1,b2` → `a1`."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]*)[^\]]*\]([^,]*))?", nodelist)
    return "".join(part or "" for part in found.groups()) if found else ""


def from_skypilot(env: Variables) -> Place | None:
    """SKYPILOT_*: the task's command runs once per node, so this process is alone there unless LOCAL_RANK is set."""
    if not env.has("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"):
        return None
    node_rank, nodes = env.seat("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES")
    local_rank, local_size = 0, 1
    if env.has("LOCAL_RANK"):
        local_rank, local_size = env.seat("LOCAL_RANK", env.first("LOCAL_WORLD_SIZE", "SKYPILOT_NUM_GPUS_PER_NODE"))
    return Place(
        rank=node_rank * local_size + local_rank,
        size=nodes * local_size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node_rank,
        master_addr=env.text("SKYPILOT_NODE_IPS").split("\n")[0].strip(),
        master_port=env.port("MASTER_PORT", DEFAULT_PORT),
        source="SkyPilot",
    )


# Rank, size, local rank, local size. PMIX_RANK comes with Open MPI's size, or with Slurm, which is asked before.
_MPI_NAMES = (
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PMIx", "PMIX_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    (
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
)


def from_mpi(env: Variables) -> Place | None:
    """Open MPI, PMI (MPICH, Intel MPI), PMIx, MVAPICH. None of them tells the host of rank 0."""
    for source, rank_name, size_name, local_rank_name, local_size_name in _MPI_NAMES:
        if env.has(rank_name, size_name):
            rank, size = env.seat(rank_name, size_name)
            local_rank, local_size = 0, 1
            if env.has(local_rank_name, local_size_name):
                local_rank, local_size = env.seat(local_rank_name, local_size_name)
            alone = "127.0.0.1" if local_size == size else ""
            address = env.text("MASTER_ADDR") or alone or next(iter(_pbs_hosts(env)), "")
            port = env.port("MASTER_PORT", DEFAULT_PORT)
            return Place(
                rank, size, local_rank, local_size, node_of(rank, local_rank, local_size), address, port, source
            )
    return None


def from_lsf(env: Variables) -> Place | None:
    """JSM_NAMESPACE_*, as jsrun sets them under LSF."""
    if not env.has("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"):
        return None
    rank, size = env.seat("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE")
    local_rank = env.integer("JSM_NAMESPACE_LOCAL_RANK", 0)
    local_size = env.integer("JSM_NAMESPACE_LOCAL_SIZE", local_rank + 1)
    # The first line of the rank file is the batch node, which runs no rank.
    hosts = _lines(env.text("LSB_DJOB_RANKFILE"))[1:] or env.text("LSB_HOSTS").split()[1:]
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node_of(rank, local_rank, local_size),
        master_addr=env.text("MASTER_ADDR") or next(iter(hosts), ""),
        master_port=env.port("MASTER_PORT", 10000 + env.integer("LSB_JOBID", 0) % 1000),
        source="LSF",
    )


def from_pbs(env: Variables) -> Place | None:
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
    rank = by_name[0] if by_name else 0
    port = env.port("MASTER_PORT", DEFAULT_PORT)
    return Place(rank, len(hosts), 0, 1, rank, env.text("MASTER_ADDR") or hosts[0], port, "PBS_NODEFILE")


def _pbs_hosts(env: Variables) -> list[str]:
    return _lines(env.text("PBS_NODEFILE"))


def _lines(path: str) -> list[str]:
    if not path:
        return []
    try:
        return Path(path).read_text().split()
    except OSError as error:
        raise WorldError(f"the scheduler's host file {path!r} cannot be read: {error.strerror}") from error


def from_tf_config(env: Variables) -> Place | None:
    """TF_CONFIG: the cluster as TensorFlow writes it. The chief is rank 0, workers follow."""
    if not env.has("TF_CONFIG"):
        return None
    try:
        config: Any = json.loads(env.text("TF_CONFIG"))
        task, cluster = config["task"], config["cluster"]
        seats = [(kind, index) for kind in ("chief", "worker") for index in range(len(cluster.get(kind, ())))]
        hosts = [cluster[kind][index].rpartition(":") for kind, index in seats]
        rank = seats.index((task["type"], int(task["index"])))
        port = int(hosts[0][2])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise WorldError(
            f"TF_CONFIG={env.text('TF_CONFIG')!r} names no training rank ({type(error).__name__}: {error}): "
            f"expected 'cluster' with chief and worker lists of host:port and a 'task' of one of them"
        ) from error
    same_host = [index for index, host in enumerate(hosts) if host[0] == hosts[rank][0]]
    nodes = list(dict.fromkeys(host[0] for host in hosts))
    return Place(
        rank=rank,
        size=len(seats),
        local_rank=same_host.index(rank),
        local_size=len(same_host),
        node_rank=nodes.index(hosts[rank][0]),
        master_addr=hosts[0][0],
        master_port=port,
        source="TF_CONFIG",
    )


ORDER: tuple[Callable[[Variables], Place | None], ...] = (
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
_HALVES = (("RANK", "WORLD_SIZE"), *((names[1], names[2]) for names in _MPI_NAMES[:2]))


def read_place(env: Variables) -> Place:
    """What the environment says: the first complete set, or a world of one when there is none."""
    for read in ORDER:
        place = read(env)
        if place is not None:
            return place
    for pair in _HALVES:
        given = [name for name in pair if env.has(name)]
        if given:
            (missing,) = set(pair) - set(given)
            raise WorldError(
                f"{given[0]}={env.text(given[0])} is set but {missing} is not: expected both or neither; "
                f"start the script with torchrun or `paceline run`, or unset {given[0]}"
            )
    return Place(0, 1, 0, 1, 0, "", 0, "a single process: no launcher's variables were found")
