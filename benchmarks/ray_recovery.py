"""How soon a job on Ray goes on after it has lost a machine: three nodes on this one, of which one is killed or frozen.

    python benchmarks/ray_recovery.py [ROUNDS]

Prints, for each round, the seconds until the loss is named and until the survivors commit their next step. Needs a
quiet machine with some cores, and `pip install 'paceline[ray,dev]'`.
"""

import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.processes import tree  # noqa: E402
from tests.procs.test_ray import TRAINING, Cluster, Launcher, environment, send  # noqa: E402


def measure(cluster: Cluster, folder: Path, number: int) -> tuple[float, float]:
    """One job that loses the machine of its first rank."""
    output, stop = folder / "output", folder / "stop"
    command = [
        sys.executable,
        "-m",
        "paceline.cli",
        "run",
        "--engine",
        "ray",
        "--ranks",
        "1:3",
        "--log-dir",
        str(folder),
    ]
    with output.open("w") as stream:
        process = subprocess.Popen(
            [*command, str(TRAINING), str(stop)], stdout=stream, stderr=stream, cwd=folder, env=environment(cluster)
        )
    try:
        job = Launcher(process, output)
        job.await_text(r"step \d\d+ of 3")
        node, at, began = cluster.nodes.pop(0), len(job.text), time.perf_counter()
        lost = tree(node)
        send(number, lost)
        job.await_text(r"was lost with its machine", at)
        named_s = time.perf_counter() - began
        job.await_text(r"step \d+ of 2", at)
        back_s = time.perf_counter() - began
        step = int(re.findall(r"step (\d+) of", job.text)[-1])
        stop.write_text(str(step + 10))
        assert job.end() == 0
        send(signal.SIGKILL, lost)
        return named_s, back_s
    finally:
        process.kill()
        process.wait()


def main(rounds: int) -> None:
    for name, number in (("killed", signal.SIGKILL), ("frozen", signal.SIGSTOP)):
        for _ in range(rounds):
            cluster = Cluster(3)
            try:
                with tempfile.TemporaryDirectory() as folder:
                    named_s, back_s = measure(cluster, Path(folder), number)
            finally:
                cluster.close()
            sys.stdout.write(f"a node {name}: named after {named_s:.2f} s, next step after {back_s:.2f} s\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
