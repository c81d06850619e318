"""Puts each mutant into a copy of the source and runs tests on it: `python -m tests.mutants.run [--only TEXT]`.

Prints which tests killed it, and the share that was killed. The tests are those of `tests/quick.txt` and some of real
processes, in an order in which the likely ones come first; the first failure ends a mutant.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
TESTS = [
    "tests/ranks",
    "tests/golden",
    "tests/procs/test_corners.py",
    "tests/procs/test_meetings.py",
    "tests/procs/test_replica.py",
    "tests/procs/test_replica_hooks.py",
    "tests/procs/test_rejoin.py",
    "tests/procs/test_waits.py",
    "tests/contracts",
    "tests/procs/test_placement.py",
    "tests/procs/test_from_meta.py",
    "tests/procs/test_shard_groups.py",
    "tests/procs/test_checksums.py",
    "tests/unit/test_agree_audit.py",
    "tests/unit/test_bucket.py",
    "tests/unit/test_step_report.py",
    "tests/unit/test_agree_finite.py",
    "tests/unit/test_agree_rotation.py",
    "tests/unit/test_deadlock.py",
    "tests/unit/test_step_ledger.py",
    "tests/unit/test_tree.py",
    "tests/unit/test_watch.py",
]
LIMIT_S = 600


def try_out(mutant: Mutant) -> tuple[bool, str]:
    """Whether the suite notices, and by which test."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        path = source / "paceline" / mutant.file
        path.write_text(path.read_text().replace(mutant.old, mutant.new))
        # A mutant may wait without end: a test that does is a test that fails.
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--timeout", "40", "-p", "no:cacheprovider", "-n", "2"]
        environment = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                [*command, "--dist", "loadfile", *TESTS],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return True, "it did not end"
    found = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode != 0, found[0].split(" - ")[0] if found else f"pytest exited with {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name or file has this text")
    asked = parser.parse_args().only
    chosen = [mutant for mutant in MUTANTS if asked in mutant.name or asked in mutant.file]
    killed = 0
    for mutant in chosen:
        begun = time.monotonic()
        dead, by = try_out(mutant)
        killed += dead
        took = f"{time.monotonic() - begun:.0f} s"
        sys.stdout.write(f"{'killed' if dead else 'LIVES '}  {mutant.file}: {mutant.name} ({took}; {by})\n")
        sys.stdout.flush()
    sys.stdout.write(f"{killed} of {len(chosen)} killed\n")


if __name__ == "__main__":
    main()
