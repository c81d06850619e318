"""From the flags of `paceline run` to a job."""

import argparse
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from paceline.errors import UsageError
from paceline.faults.fault import asked_for
from paceline.launch import ElasticTerms, Job, gpu_count
from paceline.world import World
from paceline.world.environment import DEFAULT_PORT, MAX_DIGITS, Variables, is_loopback
from paceline.world.launchers import from_skypilot, from_slurm

RECOVERY_S = 600.0


def job_from(flags: argparse.Namespace, environ: Mapping[str, str]) -> Job:
    """The job that the flags describe. Raises `UsageError` if they do not describe one."""
    gpu_ids = None if flags.gpu_ids is None else _gpu_ids(flags.gpu_ids)
    elastic = _elastic(flags)
    run_id = flags.rdzv_id if flags.rdzv_id not in ("", "none") else f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return Job(
        command=_command(flags),
        ranks=_ranks(flags.nproc_per_node, gpu_ids, environ) if elastic is None else elastic.maximum,
        elastic=elastic,
        master_port=_master_port(flags, environ),
        run_dir=Path(flags.log_dir) / re.sub(r"[^\w.-]", "_", run_id),
        gpu_ids=gpu_ids,
        max_restarts=_whole("--max-restarts", flags.max_restarts),
        hang_timeout_s=None if flags.hang_timeout is None else _seconds("--hang-timeout", flags.hang_timeout),
        shutdown_timeout_s=_seconds("--shutdown-timeout", flags.shutdown_timeout, 30.0),
        run_id=run_id,
        role=flags.role,
        faults=asked_for(environ, flags.fault),
    )


def _command(flags: argparse.Namespace) -> tuple[str, ...]:
    script, rest = str(flags.script), [str(word) for word in flags.arguments]
    if flags.no_python:
        if flags.module:
            raise UsageError("--no-python and --module cannot be combined")
        if shutil.which(script) is None:
            raise UsageError(f"the program {script!r} was not found, or cannot be executed")
        return (script, *rest)
    python = (sys.executable, "-u", "-m", "paceline.rank_script")
    if flags.module:
        return (*python, "-m", script, *rest)
    if not _exists(Path(script)):
        raise UsageError(f"the script {script!r} does not exist (looked in {Path.cwd().name}/)")
    if Path(script).is_dir() and not (Path(script) / "__main__.py").exists():
        raise UsageError(f"{script!r} is a folder without __main__.py: expected a script")
    return (*python, script, *rest)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # as where the name is too long for any file
        return False


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


def _elastic(flags: argparse.Namespace) -> ElasticTerms | None:
    """The minimum and maximum number of ranks, if --ranks was given."""
    if flags.ranks is None:
        others = {"--spares": flags.spares != "0", "--max-losses": flags.max_losses is not None}
        others["--recovery-timeout"] = flags.recovery_timeout is not None
        if given := [name for name, is_given in others.items() if is_given]:
            raise UsageError(f"{given[0]} needs --ranks MIN:MAX: ranks are replaced one by one only in an elastic job")
        return None
    if flags.nproc_per_node is not None:
        raise UsageError(
            f"--ranks {flags.ranks} and -n {flags.nproc_per_node} cannot be combined: MAX is how many ranks are started"
        )
    if not (found := re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", flags.ranks)):
        raise UsageError(f"--ranks {flags.ranks}: expected MIN:MAX, such as 2:4")
    minimum, maximum = int(found[1]), int(found[2] or found[1])
    if not 1 <= minimum <= maximum:
        raise UsageError(f"--ranks {flags.ranks}: expected MIN:MAX with a MIN of at least 1 and at most MAX")
    return ElasticTerms(
        minimum=minimum,
        maximum=maximum,
        spares=_whole("--spares", flags.spares),
        max_losses=None if flags.max_losses is None else _whole("--max-losses", flags.max_losses),
        recovery_s=_seconds("--recovery-timeout", flags.recovery_timeout, RECOVERY_S),
    )


def _gpu_ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", part) for part in parts):
        raise UsageError(f"--gpu-ids {text!r}: expected comma-separated numbers, such as 1,2")
    ids = tuple(int(part) for part in parts)
    if len(set(ids)) < len(ids):
        raise UsageError(f"--gpu-ids {text!r} names a GPU twice")
    return ids


def missing_gpus(job: Job) -> list[str]:
    """A warning about requested GPUs that do not exist."""
    count = gpu_count({})
    missing = [number for number in job.gpu_ids or () if number >= count]
    if not missing:
        return []
    there = "no GPU, so the ranks run on the CPU"
    if count:
        there = f"{count} GPUs, so the ranks do not see GPU {', '.join(map(str, missing))}"
    return [f"--gpu-ids {','.join(map(str, job.gpu_ids or ()))}: this machine has {there}"]


def _master_port(flags: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """The port at which ranks find each other, 0 for any. Raises `UsageError` for a job of several machines."""
    if flags.standalone:
        return 0
    host, port = _endpoint(flags.rdzv_endpoint) if flags.rdzv_endpoint else ("", None)
    host, port = flags.master_addr or host, flags.master_port or port
    nodes = str(flags.nnodes or "1")
    if not re.fullmatch(r"[1-9][0-9]*(:[1-9][0-9]*)?", nodes):
        raise UsageError(f"--nnodes {nodes}: expected a whole number of at least 1")
    if flags.nnodes is None and flags.node_rank is None and (place := _several_machines(environ)):
        nodes, host, port = str(place.size), host or place.master_addr, port or str(place.master_port)
    if nodes not in ("1", "1:1"):
        raise UsageError(_use_torchrun(flags, nodes, host, port))
    if _whole("--node-rank", flags.node_rank or "0"):
        raise UsageError(f"--node-rank {flags.node_rank}: expected 0, since `paceline run` starts one machine's ranks")
    if host and not is_loopback(host):
        raise UsageError(
            f"--master-addr {host}: the ranks of one machine find each other on loopback; leave the address out. "
            + _use_torchrun(flags, "NODES", host, port)
        )
    return _whole("--master-port", port or "0")


def _use_torchrun(flags: argparse.Namespace, nodes: str, host: str, port: str | None) -> str:
    """The command to use instead, for a job of several machines."""
    host = f"[{host}]" if ":" in host else host or "HOST"
    command = ["torchrun", "--nnodes", nodes, "--nproc-per-node", str(flags.nproc_per_node or 1)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port or DEFAULT_PORT}"]
    if flags.rdzv_id not in ("", "none"):
        command += ["--rdzv-id", flags.rdzv_id]
    if flags.max_restarts != "0":
        command += ["--max-restarts", flags.max_restarts]
    command += [*(["--module"] if flags.module else ()), *(["--no-python"] if flags.no_python else ())]
    return (
        f"`paceline run` starts the ranks of one machine. For several machines, run this on each of them: "
        f"{shlex.join([*command, flags.script, *flags.arguments])} (or start one task per rank with srun or mpirun). "
        f"paceline's DistributedDataParallel and checkpoints work there unchanged. So does the trainer: run the module "
        f"paceline.train with a folder that holds a config.toml, as paceline train --print-config prints it"
    )


def _endpoint(text: str) -> tuple[str, str | None]:
    """`host:port`, `host`, `[::1]:port`."""
    found = re.fullmatch(r"(?:\[(.+)\]|([^:]+))(?::(\d+))?", text)
    if found is None:
        raise UsageError(f"--rdzv-endpoint {text}: expected HOST:PORT, or HOST, or [IPv6]:PORT")
    return found[1] or found[2], found[3]


def _several_machines(environ: Mapping[str, str]) -> World | None:
    """One launcher on each of several machines, as `srun --ntasks-per-node 1` and SkyPilot start them."""
    env = Variables(environ)
    # A batch script or a shell inside an allocation is not a step on all its machines.
    slurm = from_slurm(env) if env.has("SLURM_STEP_NUM_NODES") else None
    for place in (slurm, from_skypilot(env) if not env.has("LOCAL_RANK") else None):
        if place is not None and place.size > 1 and place.local_size == 1:
            return place
    return None


def _whole(name: str, text: str, *, low: int = 0, more: str = "") -> int:
    digits = str(text)
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS) or int(digits) < low:
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


def hidden(flags: argparse.Namespace, ranks: int) -> list[int]:
    """The streams hidden for each rank: 1 standard output, 2 standard error, 3 both."""
    text = str(flags.redirects)
    found = dict(re.findall(r"(\d+):([0-3])(?:,|$)", text))
    if text in ("0", "1", "2", "3"):
        found = {str(rank): text for rank in range(ranks)}
    elif ",".join(f"{rank}:{kind}" for rank, kind in found.items()) != text:
        raise UsageError(f"--redirects {text}: expected 0, 1, 2 or 3, or one of these per rank, as in 0:3,1:1")
    _refuse_absent("--redirects", text, {int(rank) for rank in found}, ranks)
    shown = set(range(ranks))
    if flags.local_ranks_filter:
        shown = {_whole("--local-ranks-filter", part.strip()) for part in flags.local_ranks_filter.split(",")}
        _refuse_absent("--local-ranks-filter", flags.local_ranks_filter, shown, ranks)
    return [int(found.get(str(rank), 0)) if rank in shown else 3 for rank in range(ranks)]


def _refuse_absent(name: str, text: str, named: set[int], ranks: int) -> None:
    absent = sorted(rank for rank in named if rank >= ranks)
    if absent:
        there = "0" if ranks == 1 else f"0 to {ranks - 1}"
        raise UsageError(f"{name} {text}: there is no rank {absent[0]}; expected ranks among {there}")
