"""From the flags of `paceline run` to a job."""

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.launch import Job, gpu_count
from paceline.launch.seat import SECRET_NAME
from paceline.world.environment import DEFAULT_PORT, Variables
from paceline.world.launchers import from_skypilot, from_slurm


def job_from(flags: argparse.Namespace, environ: Mapping[str, str]) -> Job:
    """The job that the flags describe. Raises `UsageError` with one clear line when they cannot be."""
    gpu_ids = None if flags.gpu_ids is None else _gpu_ids(flags.gpu_ids)
    place = _place(flags, environ)
    run_id = flags.rdzv_id if flags.rdzv_id not in ("", "none") else f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return Job(
        command=_command(flags),
        ranks=_ranks(flags.nproc_per_node, gpu_ids, environ),
        run_dir=Path(flags.log_dir) / re.sub(r"[^\w.-]", "_", run_id),
        gpu_ids=gpu_ids,
        max_restarts=_whole("--max-restarts", flags.max_restarts),
        hang_timeout_s=None if flags.hang_timeout is None else _seconds("--hang-timeout", flags.hang_timeout),
        shutdown_timeout_s=_seconds("--shutdown-timeout", flags.shutdown_timeout, 30.0),
        join_timeout_s=_seconds("--join-timeout", flags.join_timeout, 600.0),
        secret=_secret(flags.secret_file, environ) if place.get("nodes", 1) > 1 else b"",
        run_id=run_id,
        role=flags.role,
        **place,
    )


def _command(flags: argparse.Namespace) -> tuple[str, ...]:
    script, rest = str(flags.script), [str(word) for word in flags.arguments]
    if flags.no_python:
        if flags.module:
            raise UsageError("--no-python and --module exclude each other")
        if shutil.which(script) is None:
            raise UsageError(f"the program {script!r} was not found, or cannot be executed")
        return (script, *rest)
    if flags.module:
        return (sys.executable, "-u", "-m", script, *rest)
    if not Path(script).exists():
        raise UsageError(f"the script {script!r} does not exist (looked in {Path.cwd().name}/)")
    if Path(script).is_dir() and not (Path(script) / "__main__.py").exists():
        raise UsageError(f"{script!r} is a folder without __main__.py: expected a script")
    return (sys.executable, "-u", script, *rest)


def _ranks(asked: str | None, gpu_ids: tuple[int, ...] | None, environ: Mapping[str, str]) -> int:
    if asked is None:
        return len(gpu_ids) if gpu_ids else 1
    if asked in ("auto", "gpu"):
        gpus = len(gpu_ids) if gpu_ids else gpu_count(environ)
        if not gpus and asked == "gpu":
            raise UsageError("--nproc-per-node gpu: this machine has no GPU; expected a number, auto or cpu")
        if gpus:
            return gpus
    if asked in ("auto", "cpu"):
        return os.cpu_count() or 1
    return _whole("--nproc-per-node", asked, low=1, more=", or auto, gpu, cpu")


def _gpu_ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"--gpu-ids {text!r}: expected numbers with commas between them, as in 1,2")
    ids = tuple(int(part) for part in parts)
    if len(set(ids)) < len(ids):
        raise UsageError(f"--gpu-ids {text!r} names a GPU twice")
    return ids


def _place(flags: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """Which machine of how many this is, and where they meet."""
    if flags.standalone:
        return {"nodes": 1, "master_port": 0}
    address, port = flags.master_addr, flags.master_port
    if flags.rdzv_endpoint:
        host, endpoint_port = _endpoint(flags.rdzv_endpoint)
        address, port = address or host, port or endpoint_port
    if flags.nnodes is None and flags.node_rank is None and (found := _from_scheduler(environ)):
        given = {"master_addr": address, "master_port": _whole("--master-port", port, low=1) if port else None}
        return {**found, **{name: value for name, value in given.items() if value}}
    low, _, high = str(flags.nnodes or "1").partition(":")
    nodes = _whole("--nnodes", low, low=1)
    if high and _whole("--nnodes", high, low=1) != nodes:
        raise UsageError(f"--nnodes {flags.nnodes}: the number of machines is fixed during a run; expected one number")
    if nodes == 1:
        return {"master_port": _whole("--master-port", port or "0"), "master_addr": address or "127.0.0.1"}
    if flags.node_rank is None:
        raise UsageError(f"--nnodes {nodes} needs --node-rank: 0 on the machine of --master-addr, 1, 2, … elsewhere")
    return {
        "nodes": nodes,
        "node_rank": _whole("--node-rank", flags.node_rank),
        "master_addr": address or "127.0.0.1",
        "master_port": _whole("--master-port", port or str(DEFAULT_PORT), low=1),
    }


def _endpoint(text: str) -> tuple[str, str | None]:
    """`host:port`, `host`, `[::1]:port`."""
    found = re.fullmatch(r"(?:\[(.+)\]|([^:]+))(?::(\d+))?", text)
    if found is None:
        raise UsageError(f"--rdzv-endpoint {text}: expected HOST:PORT, or HOST, or [IPv6]:PORT")
    return found[1] or found[2], found[3]


def _from_scheduler(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """One launcher on each machine, as `srun --ntasks-per-node 1` and SkyPilot start them."""
    env = Variables(environ)
    # A batch script or a shell inside an allocation is not a step on all its machines.
    slurm = from_slurm(env) if env.has("SLURM_STEP_NUM_NODES") else None
    for place in (slurm, from_skypilot(env) if not env.has("LOCAL_RANK") else None):
        if place is not None and place.size > 1 and place.local_size == 1:
            return {
                "nodes": place.size,
                "node_rank": place.rank,
                "master_addr": place.master_addr,
                "master_port": place.master_port,
            }
    return None


def _secret(path: str | None, environ: Mapping[str, str]) -> bytes:
    if path is None:
        return environ.get(SECRET_NAME, "").strip().encode()
    try:
        return Path(path).read_bytes().strip()
    except OSError as error:
        raise UsageError(f"--secret-file {path}: {error.strerror}") from error


def _whole(name: str, text: str, *, low: int = 0, more: str = "") -> int:
    digits = str(text)
    if not (digits.isascii() and digits.isdigit()) or int(digits) < low:
        raise UsageError(f"{name} {text}: expected a whole number of at least {low}{more}")
    return int(digits)


def _seconds(name: str, text: str | None, default: float = 0.0) -> float:
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise UsageError(f"{name} {text}: expected a number of seconds of at least 0")
    return seconds


# What is shown -----------------------------------------------------------------------------------------------------


def shown(flags: argparse.Namespace, ranks: int) -> Callable[[int], bool]:
    """Which of a machine's `ranks` are shown."""
    if not flags.local_ranks_filter:
        return lambda _: True
    named = {_whole("--local-ranks-filter", part.strip()) for part in flags.local_ranks_filter.split(",")}
    _refuse_absent("--local-ranks-filter", flags.local_ranks_filter, named, ranks)
    return lambda local: local in named


def hidden(flags: argparse.Namespace, ranks: int) -> Callable[[int], int]:
    """What is kept off the screen of each of a machine's `ranks`: 1 its output, 2 its errors, 3 both."""
    text = str(flags.redirects)
    if text in ("0", "1", "2", "3"):
        return lambda _: int(text)
    found = dict(re.findall(r"(\d+):([0-3])(?:,|$)", text))
    if ",".join(f"{rank}:{kind}" for rank, kind in found.items()) != text:
        raise UsageError(f"--redirects {text}: expected 0, 1, 2 or 3, or one of them for each rank as in 0:3,1:1")
    _refuse_absent("--redirects", text, {int(rank) for rank in found}, ranks)
    return lambda local: int(found.get(str(local), 0))


def _refuse_absent(name: str, text: str, named: set[int], ranks: int) -> None:
    absent = sorted(rank for rank in named if rank >= ranks)
    if absent:
        there = "rank 0" if ranks == 1 else f"ranks 0 to {ranks - 1}"
        raise UsageError(f"{name} {text}: there is no rank {absent[0]} on this machine; expected some of {there}")
