"""Where the ranks of this machine sit in the world, and the environment that tells them so."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.launch.job import Job
from paceline.progress import PROGRESS_NAME
from paceline.tell import TELL_NAME

LOOPBACK = "127.0.0.1"
SECRET_NAME = "PACELINE_JOB_SECRET"


@dataclass(frozen=True)
class Seat:
    """This machine's place in one attempt. `interface` is the one through which its ranks reach the others."""

    first_rank: int
    world_size: int
    master_addr: str
    master_port: int
    interface: str
    attempt: int
    run_id: str = ""


def environment_of(job: Job, seat: Seat, local_rank: int, told: str, board: str) -> dict[str, str]:
    """All variables of one rank: those of this process, torchrun's, and ours."""
    rank = seat.first_rank + local_rank
    found = {**os.environ, **job.environment}
    found.update(
        RANK=str(rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(seat.world_size),
        LOCAL_WORLD_SIZE=str(job.ranks),
        GROUP_RANK=str(job.node_rank),
        NODE_RANK=str(job.node_rank),
        GROUP_WORLD_SIZE=str(job.nodes),
        ROLE_NAME=job.role,
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(seat.world_size),
        MASTER_ADDR=seat.master_addr,
        MASTER_PORT=str(seat.master_port),
        TORCHELASTIC_RESTART_COUNT=str(seat.attempt),
        TORCHELASTIC_MAX_RESTARTS=str(job.max_restarts),
        TORCHELASTIC_RUN_ID=seat.run_id or "none",
        TORCHELASTIC_USE_AGENT_STORE="False",
        PACELINE_RUN_DIR=str(job.run_dir.absolute()),
    )
    found[TELL_NAME], found[PROGRESS_NAME] = told, board
    # Ranks need not know what the launchers share, and what they do not know they cannot print.
    found.pop(SECRET_NAME, None)
    for name, value in _unless_set(job, seat).items():
        found.setdefault(name, value)
    if job.gpu_ids is not None:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, job.gpu_ids))
    return found


def _unless_set(job: Job, seat: Seat) -> Mapping[str, str]:
    values = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if job.ranks > 1:
        values["OMP_NUM_THREADS"] = "1"
    if seat.interface:
        values["GLOO_SOCKET_IFNAME"] = seat.interface
    if job.nodes == 1:
        values["NCCL_SOCKET_IFNAME"] = "lo"
    return values


def reserve_port(port: int = 0, address: str = LOOPBACK) -> socket.socket:
    """Hold a port of this machine, any free one for 0, until the socket is closed.

    The socket is bound and does not listen. Linux then gives the port to nobody who did not name it, and lets rank 0
    bind and listen beside it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, port))
        _refuse_if_someone_listens(address, port)
    except OSError as error:
        holder.close()
        raise UsageError(
            f"port {port} of {address} cannot be used: {error.strerror or error}; "
            f"give another master_port, or 0 for any free one"
        ) from error
    return holder


def _refuse_if_someone_listens(address: str, port: int) -> None:
    if port:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            if probe.connect_ex((address, port)) == 0:
                raise OSError("someone listens there already")
