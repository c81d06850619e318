"""The start parameters of a rank: its environment variables, and the port at which ranks find each other."""

import socket
from collections.abc import Mapping

from paceline.errors import UsageError
from paceline.launch.job import Job
from paceline.rank_report import JOB_NAME, MEMBER_NAME

LOOPBACK = "127.0.0.1"
# Set unless the user has set them.
DEFAULTS = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
# For ranks that survive others, in an elastic job or a notebook. They abort NCCL and continue, so NCCL must not end
# their process, or wait. And torch prints C++ stack frames when the rank that ran the store has died, which is
# harmless there.
SURVIVORS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "25",  # 15 s by default, and four times as long until a group is released
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def rendezvous_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """torchrun's variables by which the ranks of one machine find each other."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
    }


def environment_of(
    job: Job, rank: int, port: int, attempt: int, inherited: Mapping[str, str], member: int | None = None
) -> dict[str, str]:
    """All variables of one rank, or of one `member` of an elastic job: the inherited ones, torchrun's, and
    paceline's."""
    found = {**inherited, **job.environment}
    found.update(
        rendezvous_variables(rank, job.ranks, port),
        NODE_RANK="0",
        GROUP_WORLD_SIZE="1",
        ROLE_NAME=job.role,
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(job.ranks),
        TORCHELASTIC_RESTART_COUNT=str(attempt),
        TORCHELASTIC_MAX_RESTARTS=str(job.max_restarts),
        TORCHELASTIC_RUN_ID=job.run_id or "none",
        TORCHELASTIC_USE_AGENT_STORE="False",
        PACELINE_RUN_DIR=str(job.run_dir.absolute()),
    )
    found[JOB_NAME] = job.token
    of_members = SURVIVORS if member is not None else {}
    found = {**DEFAULTS, **of_members, **({"OMP_NUM_THREADS": "1"} if job.ranks > 1 else {}), **found}
    if member is not None:
        found[MEMBER_NAME] = str(member)
    if job.gpu_ids is not None:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, job.gpu_ids))
    return found


def reserve_port(port: int = 0, host: str = LOOPBACK) -> socket.socket:
    """Hold a port of this machine, any free one for 0, until the socket is closed.

    The socket is bound but does not listen. Linux then assigns the port to no other process, and lets rank 0
    bind and listen beside it.
    """
    holder = socket.socket()
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
        if port:
            with socket.socket() as probe:
                probe.settimeout(1.0)
                if probe.connect_ex((host, port)) == 0:
                    raise OSError("another process already listens there")
    except OSError as error:
        holder.close()
        raise UsageError(
            f"port {port} of {host} cannot be used: {error.strerror or error}; "
            f"give another master_port, or 0 for any free one"
        ) from error
    return holder
