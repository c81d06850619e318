"""The matrix of faults against jobs of paceline and of torchrun: `./scripts/chaos`."""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cases import CASES, Case
from conduct import ROOT, Quiet, run, run_quiet
from targets import misses

from paceline.bench.results import dump_json
from paceline.process_status import cpu_model

WAYS = ("elastic", "restart", "torch")


def run_tests(case: Case) -> dict[str, Any]:
    """The tests that show a row."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *case.tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    passed = done.returncode == 0 and " passed" in last  # what was skipped shows nothing
    return {"passed": passed, "seconds": time.monotonic() - began, "said": last}


def cell(case: Case, result: dict[str, Any] | None) -> str:
    if result is None:
        return ""
    if "passed" in result:
        return f"{'holds' if result['passed'] else '**fails**'} ({result['said']})"
    seen, times = result["seen"], {"named": "named_s", "ended": "ended_s", "back": "back_s", "all back": "whole_s"}
    times |= {"out": "out_s"} if case.out_s is not None else {}
    words = [seen["outcome"], *[f"{name} {seen[key]:.1f} s" for name, key in times.items() if seen[key] is not None]]
    words += [f"{seen['redone']} redone"] if seen["redone"] else []
    text = ", ".join(words)
    return f"**fails** ({'; '.join(result['misses'])}): {text}" if result["misses"] else f"holds: {text}"


def table(rows: dict[str, dict[str, Any]], ways: list[str]) -> str:
    lines = ["| | fault | tests | " + " | ".join(ways) + " |", "|---" * (3 + len(ways)) + "|"]
    for case in CASES:
        if (row := rows.get(case.id)) is not None:
            cells = [cell(case, row.get(name)) for name in ("tests", *ways)]
            lines.append(f"| {case.id} | {case.about} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def chosen(names: list[str], *, ci: bool) -> list[Case]:
    known = {case.id: case for case in CASES}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"there is no row {unknown[0]}; expected some of {', '.join(known)}")
    return [known[name] for name in names] if names else [case for case in CASES if case.ci or not ci]


class Matrix:
    """Rows and what came of them, which may be run in pieces: what a file has of other rows and ways stays."""

    def __init__(self, out: Path | None) -> None:
        self.out, self.rows, self._quiet = out, dict[str, dict[str, Any]](), dict[Any, Quiet]()
        self.fresh: list[dict[str, Any]] = []
        if out is not None and out.with_suffix(".json").exists():
            self.rows = json.loads(out.with_suffix(".json").read_text())["rows"]

    def run(self, case: Case, ways: list[str], folder: Path, *, tests: bool) -> None:
        row = self.rows.setdefault(case.id, {})
        row |= {"about": case.about, "faults": [*case.faults], "deeds": [f"{x} after {n}" for n, x in case.deeds]}
        row |= {"job": [*case.launch, *case.script], "note": case.note}
        if case.tests and tests:
            self._add(case, "tests", run_tests(case))
        for way in ways if case.runs else ():
            quiet = self._quiet_of(case, way, folder) if case.equal or case.back_s is not None else None
            seen = run(case, way, folder / f"{case.id}-{way}")
            result: dict[str, Any] = {"seen": seen.plain(), "misses": misses(case, way, seen, quiet)}
            result["quiet"] = None if quiet is None else asdict(quiet)
            self._add(case, way, result)

    def _quiet_of(self, case: Case, way: str, folder: Path) -> Quiet:
        key = (way, case.like or case.ranks, case.steps_of(way), case.script)
        if key not in self._quiet:
            self._quiet[key] = run_quiet(case, way, folder / f"quiet-{len(self._quiet)}")
        return self._quiet[key]

    def _add(self, case: Case, what: str, result: dict[str, Any]) -> None:
        self.rows[case.id][what] = result
        self.fresh += [result] if what != "torch" else []
        sys.stdout.write(f"{case.id:4} {case.about:40} {what:8} {cell(case, result)}\n")
        sys.stdout.flush()
        if self.out is not None:
            self._store(self.out)

    def _store(self, out: Path) -> None:
        about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": platform.platform()}
        about |= {"cpu": cpu_model(), "cores": str(os.cpu_count()), "torch": version("torch")}
        rows = {case.id: self.rows[case.id] for case in CASES if case.id in self.rows}
        out.with_suffix(".json").write_text(dump_json({**about, "rows": rows}))
        out.with_suffix(".md").write_text(table(rows, [*WAYS]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("rows", nargs="*", help="such as F2 F7; all if none is named")
    parser.add_argument("--ci", action="store_true", help="the rows that are shown by tests in every run of the suite")
    parser.add_argument("--ways", default=",".join(WAYS), help="elastic, restart, torch; empty: tests alone")
    parser.add_argument("--no-tests", action="store_true", help="jobs alone")
    parser.add_argument("--out", type=Path, help="write NAME.json and NAME.md; rows that NAME.json has already stay")
    given = parser.parse_args()
    cases, ways = chosen(given.rows, ci=given.ci), [way for way in given.ways.split(",") if way]
    if wrong := [way for way in ways if way not in WAYS]:
        raise SystemExit(f"--ways {wrong[0]}: expected some of {', '.join(WAYS)}")
    folder, began = Path(tempfile.mkdtemp(prefix="chaos-")), time.monotonic()
    matrix = Matrix(given.out)
    for case in cases:
        matrix.run(case, ways, folder / case.id, tests=not given.no_tests)
    shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.write(f"\n{table({case.id: matrix.rows[case.id] for case in cases}, ways)}\n")
    sys.stdout.write(f"\n{len(cases)} rows in {time.monotonic() - began:.0f} s\n")
    raise SystemExit(not all(one.get("passed", not one.get("misses")) for one in matrix.fresh))


if __name__ == "__main__":
    main()
