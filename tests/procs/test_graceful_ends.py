"""A script that is over exits with status 0, whatever the threads beside it still have to do.

benchmarks/graceful_ends.py does the same hundreds of times, over shared memory and gloo, and over NCCL where there is
a GPU.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ENDS = Path(__file__).parents[2] / "benchmarks" / "graceful_ends.py"

# Several calls come back from the store while the interpreter ends: without an exit handler nearly every run aborts.
IN_A_STORE = """
import sys
from datetime import timedelta
import torch.distributed as dist
from paceline.collectives.store_call import StoreCall

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def wait(ms):
    try:
        store.wait(["never"], timedelta(milliseconds=ms))
    except dist.DistStoreError:
        sys.stdout.write("back\\n")

calls = [StoreCall(lambda _, ms=ms: wait(ms)) for ms in (20, 60, 120, 250)]
sys.exit(3)
"""


def test_a_call_to_the_store_may_outlive_the_script() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_STORE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "back\n" * 4), done.stderr


@pytest.mark.timeout(180)  # the load is meant, and there may be more of it
@pytest.mark.parametrize("how", ["starved", "in every way, over gloo", "in every way, over shared memory"])
def test_ranks_that_are_done_exit_well(how: str) -> None:
    options = {
        "starved": ["--ways", "last", "--transports", "torch", "--ends", "3", "--starve"],
        "in every way, over gloo": ["--transports", "torch", "--ends", "8"],
        "in every way, over shared memory": ["--transports", "shm", "--ends", "8"],
    }
    command = [sys.executable, str(ENDS), "--ranks", "2", "--load", "1", *options[how]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
