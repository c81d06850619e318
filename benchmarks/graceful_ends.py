"""Ends small training jobs gracefully, again and again and under load, and counts the ranks that died instead.

    python benchmarks/graceful_ends.py --ends 300                      # gloo and shared memory, 2 and 4 ranks
    python benchmarks/graceful_ends.py --ends 100 --device cuda        # NCCL; the ranks share one GPU

Ranks are forked off this process, which has imported torch, so that an end costs little more than itself. A forked rank
leaves by the way every script does: it returns to the interpreter, which then takes everything down. With `--launcher`
they are started by `paceline run` instead. The exit status is the number of jobs in which a rank died, at most 100.
"""

import argparse
import faulthandler
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

import paceline

# How a rank ends: what is still alive when its script is over, and who tidies up.
WAYS = ("return", "global", "destroy", "shutdown", "exit", "late", "sigterm", "last")
STEPS = 4
HUNG_S = 60.0
# Ends with its parent, however that ends.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(1000))"
KEPT: list[object] = []  # what a module of a user's would hold until the interpreter clears it


# ------------------------------------------------------------------------------------------------------- one rank


def train(rank: int, size: int, transport: str, way: str, device: torch.device, starve: bool) -> None:
    """A few steps with every kind of collective, ended in one of `WAYS`."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(device)
    model = paceline.DistributedDataParallel(net, transport=transport, bucket_plan="fixed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if way == "sigterm":
        train_until_told(rank, model, optimizer, device)
    else:
        for step in range(STEPS):
            take_step(model, optimizer, device, rank + step)
    mean = paceline.all_reduce(torch.tensor([float(rank)], device=device), "mean")
    assert mean.item() == (size - 1) / 2
    paceline.barrier()
    if starve:
        starve_others()
    end(way, rank, [model, optimizer, mean])


def train_until_told(rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    with paceline.Preemption(within=0) as preemption:
        for step in itertools.count():
            take_step(model, optimizer, device, rank + step)
            if step == STEPS and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            if preemption.agreed():
                return


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, seed: int) -> None:
    batch = torch.full((4, 32), 0.01 * seed, device=device)
    model(batch).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def end(way: str, rank: int, held: list[object]) -> None:
    if way in ("global", "exit"):
        KEPT.extend(held)
    if way == "destroy":
        dist.destroy_process_group()
    elif way == "shutdown":
        paceline.shutdown()
    elif way == "exit":
        sys.exit(0)
    elif way == "late" and rank == 0:
        time.sleep(0.3)
    elif way == "last":
        # Nobody else holds the tensor, and gloo's thread lets go of it only when it gets to run.
        dist.all_reduce(torch.ones(40000))


def run_rank(
    rank: int, size: int, store: str, transport: str, way: str, device_kind: str, starve: bool = False
) -> None:
    torch.set_num_threads(1)
    if device_kind == "cuda":
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
        torch.cuda.set_device(rank % torch.cuda.device_count())
        device, backend = torch.device("cuda", torch.cuda.current_device()), "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    if store:
        host, port = store.split(":")
        meeting = dist.TCPStore(host, int(port), size, is_master=rank == 0, wait_for_workers=False)
        dist.init_process_group(backend, store=meeting, rank=rank, world_size=size)
    else:
        paceline.init()
    train(rank, size, transport, way, device, starve)


def starve_others() -> None:
    """Let the other threads of this process run only when nobody else wants to: what is late becomes very late."""
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) == os.getpid():
            continue
        with suppress(ProcessLookupError):  # a thread may end meanwhile
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


# ---------------------------------------------------------------------------------------------------- all of them


def fork_job(size: int, transport: str, way: str, device: str, folder: Path, starve: bool) -> "list[int] | None":
    """The exit codes of the ranks of one job. None in a rank, whose script is over."""
    store = f"127.0.0.1:{free_port()}"
    pids: list[int] = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            log = os.open(folder / f"rank-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1), os.dup2(log, 2)
            faulthandler.enable()
            faulthandler.dump_traceback_later(HUNG_S, exit=True)
            run_rank(rank, size, store, transport, way, device, starve)
            return None
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def launch_job(size: int, transport: str, way: str, device: str, folder: Path) -> list[int]:
    command = [sys.executable, "-m", "paceline.cli", "run", "-n", str(size), "--log-dir", str(folder)]
    script = [__file__, "--rank", "--transport", transport, "--way", way, "--device", device]
    with Path(folder, "rank-0").open("w") as log:
        return [subprocess.run([*command, *script], stdout=log, stderr=log, check=False).returncode]


def free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        return int(holder.getsockname()[1])


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def report(folder: Path, codes: Sequence[int], what: str) -> None:
    tell(f"{what}: exit codes {list(codes)}")
    for log in sorted(folder.glob("rank-*")):
        if log.is_file() and (text := log.read_text(errors="replace").strip()):
            tell(f"--- {log.name}\n{text[-6000:]}")


def main() -> int:
    options = parse()
    if options.rank:
        world = paceline.World.from_env()
        run_rank(world.rank, world.size, "", options.transport, options.way, options.device)
        return 0
    # Load what would take each rank a second.
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    assert all(hasattr(paceline, name) for name in paceline.__all__)
    owner, folder = os.getpid(), Path(tempfile.mkdtemp(prefix="graceful-ends-"))
    busy = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(options.load)]
    try:
        return end_jobs(options, folder)
    finally:
        if os.getpid() == owner:  # forked ranks leave through here too
            for process in busy:
                process.kill()
                process.wait()
            shutil.rmtree(folder)


def end_jobs(options: argparse.Namespace, folder: Path) -> int:
    transports = ["torch"] if options.device == "cuda" else options.transports.split(",")
    cases = list(itertools.product(options.ways.split(","), transports, map(int, options.ranks.split(","))))
    ended, died = Counter[str](), Counter[str]()
    started = time.monotonic()
    for number in range(options.ends):
        way, transport, size = cases[number % len(cases)]
        if options.launcher:
            codes = launch_job(size, transport, way, options.device, folder)
        else:
            forked = fork_job(size, transport, way, options.device, folder, options.starve)
            if forked is None:
                return 0  # this is a rank whose script is over
            codes = forked
        name = f"{transport}, {size} ranks, {way}"
        ended[name] += 1
        if any(codes):
            died[name] += 1
            report(folder, codes, f"end {number + 1} ({name})")
        elif (number + 1) % 50 == 0:
            tell(f"{number + 1} ends, {died.total()} of them with a death")
    tell(f"{ended.total()} ends in {time.monotonic() - started:.0f} s, in {died.total()} of them a rank died")
    for name in sorted(died):
        tell(f"  {name}: {died[name]} of {ended[name]}")
    return min(died.total(), 100)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ends", type=int, default=300, help="how many jobs")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks")
    parser.add_argument("--transports", default="torch,shm", help="torch is gloo, or NCCL on cuda")
    parser.add_argument("--ways", default=",".join(WAYS), help="how ranks end")
    parser.add_argument("--load", type=int, default=2, help="busy loops beside the ranks")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--starve", action="store_true", help="hold up the threads of gloo and the store")
    parser.add_argument("--launcher", action="store_true", help="start ranks with `paceline run`")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--transport", default="torch", help=argparse.SUPPRESS)
    parser.add_argument("--way", default="return", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
