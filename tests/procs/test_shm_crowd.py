"""Many more ranks than cores, forked off one process that has imported torch, so that even 64 start at once."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from paceline.collectives import LocalTransport, Op, StoreWatch, finish
from paceline.collectives.shm import ShmTransport
from paceline.collectives.shm.connect import PeerInfo, PeerListener, connect
from paceline.collectives.store_gather import Rendezvous

CPU = torch.device("cpu")
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Runs `size` ranks; exits with 0 if all of them do."""
    size, path = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limit), limit))  # what most users have
    parent, children = os.getpid(), []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            code = 1
            try:
                if os.getppid() == parent:
                    be_rank(rank, size, path)
                    code = 0
            finally:
                if code:
                    sys.excepthook(*sys.exc_info())
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, codes)))


def be_rank(rank: int, size: int, path: str) -> None:
    store = dist.FileStore(path, size)
    watch = StoreWatch(store, rank, size)
    rendezvous = Rendezvous.next(store, rank, size, watch, 40)
    with PeerListener(rank) as listener:
        told = rendezvous.gather("peer info", listener.own.encode())
        mesh = connect(rendezvous, listener, [PeerInfo.decode(text, rank) for rank, text in enumerate(told)])
    transport = ShmTransport(mesh, watch=watch, fallback=LocalTransport())
    flat = transport.allocate(1 << 18, torch.float32, CPU)
    for number in range(10):
        flat.fill_(rank + number)
        finish(transport.all_reduce(flat), what=f"bucket {number}", watch=transport.watch, timeout_s=40)
        assert flat[0] == flat[-1] == sum(range(size)) + size * number
    # More owners than cache lines: most have no slice.
    few = torch.full((33,), float(rank))
    finish(transport.all_reduce(few, Op.MAX), what="a few", watch=transport.watch, timeout_s=40)
    assert few.tolist() == [size - 1] * 33
    out = torch.empty(size)
    finish(transport.all_gather(out, torch.tensor([float(rank)])), what="one each", watch=transport.watch, timeout_s=40)
    assert out.tolist() == list(range(size))
    transport.close()


@pytest.mark.parametrize("size", [8, 64])
def test_many_ranks_share_few_cores_and_descriptors(size: int, tmp_path: Path) -> None:
    code = f"import sys; sys.path[:] = {sys.path!r}; from tests.procs.test_shm_crowd import main; main()"
    command = [sys.executable, "-W", "error", "-c", code, str(size), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
