"""How long a notebook with two ranks makes a person wait, through a real kernel, beside the import of torch.

    python benchmarks/notebook_times.py --json benchmarks/<date>-<hardware>-notebook.json

On a machine with a GPU both ranks share it and talk over gloo, or with --nccl over NCCL.
Times are the person's: from the cell that is sent, or the stop button, or the kill, to the last word of the kernel.
"""

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from paceline.bench.results import Circumstances, dump_json
from tests.notebook.notebook import Notebook

RANKS = 2
# Seconds; what a target says of torch's import is added where it is measured.
TARGETS = {"ready": 1.5, "empty cell": 0.030, "interrupt": 0.3, "death": 0.2, "respawn": 1.0, "error lines": 15}
BLOCKED = {
    "all_reduce": "print('in'); dist.all_reduce(x); x.sum().item()",
    "barrier": "print('in'); dist.barrier()",
    "paceline backward": "print('in'); model(x).sum().backward()",
    "torch DDP backward": "print('in'); theirs(x).sum().backward(); x.sum().item()",
    "sleep": "import time; print('in'); time.sleep(60)",
}
MODELS = """
x = torch.ones(8, 16, device=device)
model = paceline.DistributedDataParallel(torch.nn.Linear(16, 4).to(device))
theirs = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4).to(device))
"""


def import_of_torch() -> float:
    """Of as many processes at once as there are ranks, as a boot does it."""
    began = time.monotonic()
    running = [subprocess.Popen([sys.executable, "-c", "import torch, torch.distributed"]) for _ in range(RANKS)]
    for process in running:
        process.wait()
    return time.monotonic() - began


def measure(repeat: int, folder: Path, init: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in ("import", "ready", "empty cell", "death", "respawn")}
    found["import"] = [import_of_torch() for _ in range(repeat)]
    notebook = Notebook(folder)
    try:
        notebook.good("%load_ext paceline")
        for _ in range(repeat):
            found["ready"].append(notebook.good(init).seconds)
            notebook.good("%dist_shutdown")
        notebook.good(init)
        found["empty cell"] = [notebook.good("pass").seconds for _ in range(100)]
        for name, code in BLOCKED.items():
            found[f"interrupt {name}"] = [interrupt(notebook, code) for _ in range(repeat)]
        for _ in range(repeat):
            found["death"].append(death(notebook))
            found["respawn"].append(notebook.good("%dist_restart 1").seconds)
        error = notebook.run("def f(n):\n    return 1 / n\n\ndef g(n):\n    return f(n)\n\ng(0)").error
        found["error lines"] = [float(len(error.splitlines()))]
    finally:
        notebook.close()
    return found


def take_each_rank_for_a_host(folder: Path) -> None:
    """NCCL refuses two ranks of one host on one GPU."""
    name = "NCCL_HOSTID"
    (folder / "sitecustomize.py").write_text(f"import os\nos.environ['{name}'] = 'rank' + os.environ.get('RANK', '')\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def interrupt(notebook: Notebook, code: str) -> float:
    notebook.good(MODELS)
    time.sleep(1.0)  # what loads beside the first cells has loaded
    return notebook.run(f"%%rank [0]\n{code}", stop_at="in\n").stopped_s


def death(notebook: Notebook) -> float:
    """From SIGKILL to the line that names it, while both ranks are in a cell."""
    pids = [int(pid) for pid in re.findall(r"PID (\d+)", notebook.good("%dist_status").stdout)]
    killed: list[float] = []
    seen: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        os.kill(pids[1], signal.SIGKILL)

    timer = threading.Timer(1.0, kill)
    timer.start()
    notebook.run("import time\ntime.sleep(3)", when={"rank 1 was killed": lambda: seen.append(time.monotonic())})
    timer.join()
    return seen[0] - killed[0]


def compare_with_targets(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    imported = statistics.median(found["import"])
    rows = []
    for name, samples in found.items():
        target = next((limit for key, limit in TARGETS.items() if name.startswith(key)), None)
        if target is not None and name in ("ready", "respawn"):
            target += imported
        middle = statistics.median(samples)
        rows.append(
            {"what": name, "median": middle, "target": target, "met": None if target is None else middle <= target}
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--nccl", action="store_true", help="ranks that share a GPU talk over NCCL")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    init = f"%dist_init -n {RANKS}"
    if given.nccl:
        take_each_rank_for_a_host(folder)
        init += " --backend cpu:gloo,cuda:nccl"
    try:
        found = measure(given.repeat, folder, init)
    finally:
        shutil.rmtree(folder)
    rows = compare_with_targets(found)
    for row in rows:
        target = "" if row["target"] is None else f"  target {row['target']:.3g}: {'met' if row['met'] else 'NOT met'}"
        sys.stdout.write(f"{row['what']:<32}{row['median']:>9.4g}{target}\n")
    if given.json is not None:
        report = {
            "schema": "paceline-notebook/1",
            **asdict(Circumstances.now()),
            "ranks": RANKS,
            "rows": rows,
            "samples_s": found,
        }
        given.json.write_text(dump_json(report))


if __name__ == "__main__":
    main()
