"""`paceline doctor`: examines this machine and says, one line each, what is fine, worth knowing, or broken."""

import argparse
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.launch import Job, JobOutcome, Listener, gpu_count, supervise
from paceline.process_status import memory_limit
from paceline.world import World

OK, NOTE, BROKEN = "ok", "note", "BROKEN"
MIB = 1 << 20
PROBE_RANKS = 2
# Below this many open files, loaders with a few workers fail in obscure ways.
FEW_FILES = 1024
SMALL_SHM = 1 << 30
NAMES = {
    "ShmTransport": "shared memory",
    "TwoLevelTransport": "shared memory inside a host and torch.distributed between hosts",
    "TorchDistTransport": "torch.distributed",
}


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    about: str
    level: str
    text: str


def main(argv: Sequence[str]) -> int:
    """Examine this machine, or one script. The exit code is 1 if something is broken."""
    asked = build_parser().parse_args(argv)
    if asked.determinism is not None:
        from paceline.cli.determinism import main as determinism

        return determinism(asked.determinism, asked.steps)
    broken = 0
    for finding in examine():
        broken += finding.level == BROKEN
        sys.stdout.write(f"{finding.about:<12} {finding.level:<6}  {finding.text}\n")
        sys.stdout.flush()
    sys.stdout.write(f"\n{broken} broken\n" if broken else "\nnothing is broken\n")
    return 1 if broken else 0


def build_parser() -> argparse.ArgumentParser:
    about = "Examine this machine: devices, backends, limits, an all-reduce, and which transport is chosen and why."
    usage = "paceline doctor [--steps N] [--determinism SCRIPT [ARGUMENT …]]"
    parser = argparse.ArgumentParser("paceline doctor", usage, about, allow_abbrev=False)
    parser.add_argument(
        "--determinism",
        nargs=argparse.REMAINDER,
        help="instead: run a script twice, as `paceline run` does, and report what it computes differently. Everything "
        "that follows belongs to the script. Exit status 0 if both runs give the same bits, 1 if not, 2 if unknown",
    )
    parser.add_argument("--steps", type=_steps, default=2, metavar="N", help="steps that --determinism compares [2]")
    return parser


def _steps(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def examine() -> Iterator[Finding]:
    """All findings, the quick ones first."""
    checks: Sequence[Callable[[], Iterator[Finding]]] = (environment, devices, ports, limits, ranks)
    for check in checks:
        yield from check()


def environment() -> Iterator[Finding]:
    found = f"Python {platform.python_version()}, Linux {platform.release()}"
    try:
        found += f", torch {version('torch')}, paceline {version('paceline')}"
    except PackageNotFoundError as error:
        # paceline may well be used from its sources; without torch nothing else here will be fine.
        level = NOTE if error.name == "paceline" else BROKEN
        yield Finding("environment", level, f"{found}; {error.name} is not installed")
    else:
        yield Finding("environment", OK, found)
    try:
        world = World.from_env()
    except PacelineError as error:
        yield Finding("launcher", BROKEN, str(error))
    else:
        yield Finding("launcher", OK, f"rank {world.rank} of {world.size}; read from: {world.source}")


def devices() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    hidden = f" of {os.cpu_count()}" if os.cpu_count() != cores else ""
    yield Finding("devices", OK, f"{cores}{hidden} processor cores, {gpu_count()} GPUs")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        yield Finding("devices", NOTE, f"CUDA_VISIBLE_DEVICES={visible!r} decides which GPUs ranks see")


def ports() -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
            yield Finding(
                "ports",
                OK,
                "loopback accepts connections; ranks of one machine find each other there, at any free port",
            )
    except OSError as error:
        yield Finding("ports", BROKEN, f"loopback accepts no connections: {error}; ranks cannot find each other")
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface is not None:
        known = [name for _, name in socket.if_nameindex()]
        missing = [name for name in interface.split(",") if name not in known]
        level = BROKEN if missing else NOTE
        yield Finding("ports", level, f"GLOO_SOCKET_IFNAME={interface}; interfaces here: {', '.join(known)}")


def limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    many = files == resource.RLIM_INFINITY or files >= FEW_FILES
    advice = "" if many else f"; loaders may need more: ulimit -n {FEW_FILES}"
    yield Finding("limits", OK if many else NOTE, f"{files if files >= 0 else 'any number of'} open files{advice}")
    try:
        os.close(os.memfd_create("paceline-doctor"))
    except OSError as error:
        yield Finding("limits", NOTE, f"memory cannot be shared through memfd ({error}); ranks use torch.distributed")
    else:
        yield Finding("limits", OK, "memory can be shared through memfd; /dev/shm is not needed for it")
    shm = Path("/dev/shm")
    if shm.is_dir():
        size = shutil.disk_usage(shm).total
        small = size < SMALL_SHM
        advice = "; loader workers and NCCL use it: docker run --shm-size 8g" if small else ""
        yield Finding("limits", NOTE if small else OK, f"/dev/shm holds {size / MIB:,.0f} MiB{advice}")
    limit = memory_limit()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if limit is not None and limit < total:
        yield Finding(
            "limits", NOTE, f"the control group allows {limit / MIB:,.0f} of {total / MIB:,.0f} MiB of memory"
        )
    else:
        yield Finding("limits", OK, f"{total / MIB:,.0f} MiB of memory, not limited by a control group")


@dataclass
class ProbeListener(Listener):
    """Keeps what the ranks of the probe report and write."""

    reports: list[tuple[int, str, dict[str, Any]]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def line(self, rank: int, text: str) -> None:
        if text.strip() and text not in self.warnings:
            self.warnings.append(text)

    def reported(self, rank: int, kind: str, fields: dict[str, Any]) -> None:
        self.reports.append((rank, kind, fields))


def ranks() -> Iterator[Finding]:
    """Two ranks of this machine, started as `paceline run` starts them."""
    listener = ProbeListener()
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as folder:
        command = (sys.executable, "-m", "paceline.cli.probe")
        job = Job(command=command, ranks=PROBE_RANKS, run_dir=Path(folder), shutdown_timeout_s=5.0)
        try:
            outcome = supervise(job, listener)
        except PacelineError as error:
            yield Finding("ranks", BROKEN, str(error))
            return
    yield from _findings(listener, outcome)


def _findings(listener: ProbeListener, outcome: JobOutcome) -> Iterator[Finding]:
    for rank, kind, told in listener.reports:
        if rank == 0 and kind == "torch":
            gpus = f"; GPUs: {', '.join(told['gpus'])}" if told["gpus"] else ""
            cuda = f" with CUDA {told['cuda']}" if told["cuda"] else ", CPU only"
            text = f"torch {told['version']}{cuda}; torch.distributed has {', '.join(told['backends'])}{gpus}"
            yield Finding("backends", OK if "gloo" in told["backends"] else BROKEN, text)
    reduced = [told for rank, kind, told in listener.reports if rank == 0 and kind == "reduced"]
    for told in reduced:
        yield _reduction(told)
    if outcome.failure is not None:
        yield Finding("ranks", BROKEN, " | ".join(line.strip() for line in outcome.failure.lines()))
    elif outcome.exit_code:
        yield Finding("ranks", NOTE, f"the all-reduce test was ended by {outcome.signal}")
    yield from _choice(reduced, listener.warnings)


def _reduction(told: dict[str, Any]) -> Finding:
    name = {"gloo": "gloo", "auto": "paceline's choice", "nccl": "NCCL"}[told["over"]]
    moved = 2 * (told["ranks"] - 1) / told["ranks"] * told["bytes"]
    text = (
        f"{told['ranks']} ranks over {name}: 25 MiB in {told['large_s'] * 1e3:.1f} ms "
        f"({moved / told['large_s'] / 1e9:.2f} GB/s), 4 KiB in {told['small_s'] * 1e6:.0f} µs"
    )
    return Finding(
        "all-reduce", OK if told["right"] else BROKEN, text if told["right"] else f"{text}; the sum is WRONG"
    )


def _choice(reduced: Sequence[dict[str, Any]], warnings: Sequence[str]) -> Iterator[Finding]:
    chosen = next((told for told in reduced if told["over"] == "auto"), None)
    if chosen is None:
        return
    name = NAMES.get(chosen["transport"], chosen["transport"])
    why = "all ranks run on this host and can share memory"
    if chosen["transport"] == "TorchDistTransport":
        why = next((text for text in warnings if "do not share memory" in text), "ranks cannot share memory")
    yield Finding("choice", OK, f"transport='auto' takes {name} for CPU tensors here: {why}")
    if gpu_count() > 1:
        yield Finding("choice", OK, "transport='auto' takes torch.distributed with NCCL for CUDA tensors")
