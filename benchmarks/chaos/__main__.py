"""The matrix of faults against jobs of paceline and of torchrun: `./scripts/chaos`."""

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cases import CASES, Case
from conduct import ROOT, Seen, run

from paceline.bench.results import dump_json

WAYS = ("elastic", "restart", "torch")


def run_tests(case: Case) -> dict[str, Any]:
    """The tests that show a row."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *case.tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    return {"passed": done.returncode == 0, "seconds": time.monotonic() - began, "said": last}


def holds(case: Case, seen: Seen, quiet: str) -> bool:
    """Whether a job did what the row asks for."""
    ends_well = seen.outcome == "finished" and (not case.equal or set(seen.digests) == {quiet})
    if case.hosts in ("partition", "one-way"):  # nobody may go on, and nobody may hang
        ends_well = seen.outcome == "failed"
    return ends_well and not seen.left and (not case.named or seen.named_s is not None)


def cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return ""
    if "passed" in result:
        return f"{'holds' if result['passed'] else '**fails**'} ({result['said']})"
    seen = result["seen"]
    times = [
        f"{name} {seen[key]:.1f} s" for name, key in (("named", "named_s"), ("back", "back_s")) if seen[key] is not None
    ]
    words = [seen["outcome"], *times, f"{seen['redone']} redone" if seen["redone"] else ""]
    words += ["other digest" if result["differs"] else "", f"left {', '.join(seen['left'])}" if seen["left"] else ""]
    return f"{'holds' if result['holds'] else '**fails**'}: {', '.join(word for word in words if word)}"


def table(results: dict[str, dict[str, Any]], ways: list[str]) -> str:
    lines = ["| | fault | tests | " + " | ".join(ways) + " |", "|---" * (3 + len(ways)) + "|"]
    for case in CASES:
        if (row := results.get(case.id)) is not None:
            cells = [cell(row.get(name)) for name in ("tests", *ways)]
            lines.append(f"| {case.id} | {case.about} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def chosen(names: list[str], *, ci: bool) -> list[Case]:
    known = {case.id: case for case in CASES}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"there is no row {unknown[0]}; expected some of {', '.join(known)}")
    return [known[name] for name in names] if names else [case for case in CASES if case.ci or not ci]


def quiet_digest(way: str, ranks: int, workers: int, folder: Path) -> str:
    seen = run(Case(id="quiet", about="", ranks=ranks, workers=workers), way, folder)
    if seen.outcome != "finished" or len(set(seen.digests)) != 1:
        raise SystemExit(f"the quiet job of {way} did not finish:\n" + "\n".join(seen.end))
    return seen.digests[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("rows", nargs="*", help="such as F2 F7; all if none is named")
    parser.add_argument("--ci", action="store_true", help="the rows that are shown by tests in every run of the suite")
    parser.add_argument("--ways", default=",".join(WAYS), help="elastic, restart, torch; empty: tests alone")
    parser.add_argument("--no-tests", action="store_true", help="jobs alone")
    parser.add_argument("--out", type=Path, help="write NAME.json and NAME.md")
    given = parser.parse_args()
    cases, ways = chosen(given.rows, ci=given.ci), [way for way in given.ways.split(",") if way]
    if wrong := [way for way in ways if way not in WAYS]:
        raise SystemExit(f"--ways {wrong[0]}: expected some of {', '.join(WAYS)}")
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    results: dict[str, dict[str, Any]] = {}
    quiet: dict[tuple[str, int], str] = {}
    for case in cases:
        row = results[case.id] = {
            "about": case.about,
            "faults": [*case.faults, *(f"{x} after {n}" for n, x in case.signals)],
        }
        if case.tests and not given.no_tests:
            row["tests"] = run_tests(case)
            say(case, "tests", row["tests"])
        for way in ways if case.faults or case.signals or case.hosts or case.clock else ():
            if way == "elastic" and (case.hosts or case.signals):
                continue  # it is of one machine, and saves nothing
            key = (way, case.ranks)
            if case.equal and key not in quiet:
                quiet[key] = quiet_digest(way, case.ranks, 0, folder / f"quiet-{way}-{case.ranks}")
            seen = run(case, way, folder / f"{case.id}-{way}")
            differs = case.equal and bool(seen.digests) and set(seen.digests) != {quiet[key]}
            row[way] = {"seen": seen.plain(), "holds": holds(case, seen, quiet.get(key, "")), "differs": differs}
            say(case, way, row[way])
    shutil.rmtree(folder, ignore_errors=True)
    text = table(results, ways)
    sys.stdout.write(f"\n{text}\n")
    if given.out is not None:
        about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": platform.platform()}
        given.out.with_suffix(".json").write_text(dump_json({**about, "rows": results}))
        given.out.with_suffix(".md").write_text(text + "\n")
    ours = [row[name] for row in results.values() for name in ("tests", "elastic", "restart") if name in row]
    raise SystemExit(not all(one.get("passed", one.get("holds")) for one in ours))


def say(case: Case, what: str, result: dict[str, Any]) -> None:
    sys.stdout.write(f"{case.id:4} {case.about:40} {what:8} {cell(result)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
