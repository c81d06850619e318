"""Puts each mutant into a copy of the source and runs tests on it: `python -m tests.mutants.run [--only TEXT]`.

Prints which tests killed it, and the share that was killed; before that, whether the source as it is passes. The tests
are those of `tests/quick.txt` and some of real processes, in an order in which the likely ones come first; the first
failure ends a mutant.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the suite has made of a mutant."""

    killed: bool
    by: str  # the test that failed first, or what else ended the run
    took_s: float


def run_suite(source: Path, timeout_s: int) -> tuple[int | None, str]:
    """The exit code of pytest, None if it did not end, and the first test that failed."""
    # A mutant may wait without end: a test that does is a test that fails.
    options = ["-x", "-q", "--timeout", str(timeout_s), "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]
    environment = os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *TESTS],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return None, "it did not end"
    found = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, found[0].split(" - ")[0] if found else f"pytest exited with {done.returncode}"


def try_out(mutant: Mutant | None, timeout_s: int) -> Verdict:
    """Whether the suite notices, and by which test. None: the source as it is."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            path = source / "paceline" / mutant.file
            path.write_text(path.read_text().replace(mutant.old, mutant.new))
        begun = time.monotonic()
        code, by = run_suite(source, timeout_s)
        return Verdict(code != 0, by, round(time.monotonic() - begun, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name or file has this text")
    parser.add_argument("--timeout", type=int, default=40, help="seconds of a test; more on a busy machine")
    parser.add_argument("--json", type=Path, help="write all verdicts here, after each of them")
    given = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if given.only in mutant.name or given.only in mutant.file]
    control = try_out(None, given.timeout)
    say(f"without a mutant: {control.by} ({control.took_s:.0f} s)")
    if control.killed:
        raise SystemExit("the suite fails without a mutant, so it could not tell any")
    verdicts: dict[str, Any] = {}
    for mutant in chosen:
        found = try_out(mutant, given.timeout)
        verdicts[f"{mutant.file}: {mutant.name}"] = asdict(found)
        say(
            f"{'killed' if found.killed else 'LIVES '}  {mutant.file}: {mutant.name} ({found.took_s:.0f} s; {found.by})"
        )
        if given.json:
            given.json.write_text(json.dumps({"control_s": control.took_s, "mutants": verdicts}, indent=1) + "\n")
    say(f"{sum(found['killed'] for found in verdicts.values())} of {len(chosen)} killed")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
