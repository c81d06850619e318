"""The matrix of faults (`scripts/chaos`) is whole, its tests exist, and what a row asks for is checked."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paceline.faults import parse

ROOT = Path(__file__).parents[2]
CHAOS = ROOT / "benchmarks" / "chaos"


def modules() -> tuple[Any, Any, Any, Any]:
    """Of a folder that is run, and not installed."""
    names = ("cases", "conduct", "deeds", "targets")
    before = set(sys.modules)
    sys.path.insert(0, str(CHAOS))
    try:
        cases, conduct, deeds, targets = (__import__(name) for name in names)
    finally:
        sys.path.remove(str(CHAOS))
        for name in {*names, "hosts"} - before:
            sys.modules.pop(name, None)
    return cases, conduct, deeds, targets


cases, conduct, deeds, targets = modules()
CASES = cases.CASES


@cache
def functions(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_row_is_there_once() -> None:
    assert [case.id for case in CASES] == [*[f"F{number}" for number in range(1, 39)], "hang"]
    ci = [case.id for case in CASES if case.ci]
    assert ci == ["F1", "F2", "F3", "F7", "F18", "F20", "F22", "F24", "F26", "F28", "F29", "F36"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.id))
def test_a_row_can_be_run(case: Any) -> None:
    assert case.runs
    assert case.tests or not case.ci, "what every run of the suite shows is shown by tests"
    for node in case.tests:
        file, _, name = node.partition("::")
        assert (ROOT / file).is_file() and (not name or name in functions(file)), node
    for fault in (*case.faults, *case.live):
        assert parse(fault).rank < case.ranks
    for _, deed in case.deeds:
        assert case.hosts or deed in deeds.DEEDS
    assert case.named or case.named_s == cases.DEATH_S, "a time in which nothing has to be named"


def wrong(case: dict[str, Any], seen: dict[str, Any], way: str = "elastic") -> list[str]:
    """What is missed of a row by a job that else does all that is asked for."""
    row = cases.Case(id="F0", about="", named="rank 1", **case)
    good = {"digests": ["a"], "named_s": 0.1, "back_s": 0.2, "whole_s": 5.0, "ended_s": 9.0, "out_s": 2.0}
    found = targets.misses(row, way, conduct.Seen(**{**good, **seen}), conduct.Quiet("a", 4.0, 0.05))
    assert isinstance(found, list)
    return found


def each_target() -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    """What a row asks for, what was seen instead, and what is said of it."""
    yield {}, {"outcome": "hung"}, "hung"
    yield {}, {"digests": ["b"]}, "another digest"
    yield {}, {"digests": ["a", "b"]}, "another digest"
    yield {}, {"named_s": None}, "not named"
    yield {}, {"named_s": 1.1}, "named after 1.10 s, expected 1.00"
    yield {"ended_s": 13.0}, {"ended_s": 13.5}, "ended after 13.50 s, expected 13.00"
    yield {"out_s": 5.0}, {"out_s": 6.0}, "out after 6.00 s, expected 5.00"
    yield {"back_s": 0.5}, {"back_s": 0.6}, "back after 0.55 s, expected 0.50"
    yield {"back_s": 0.5}, {"back_s": None}, "not back"
    yield {"whole_again": True}, {"whole_s": 6.5}, "all ranks back after 6.50 s, expected 6.00"
    yield {"code": 143}, {"first_code": 1}, "exit status 1, expected 143"
    yield {"steady": True}, {"redone": 2}, "2 steps made twice"
    yield {}, {"redone": 2}, "2 committed steps lost"
    yield {}, {"left": ["process 7"]}, "left process 7"


@pytest.mark.parametrize(("case", "seen", "said"), [*each_target()])
def test_what_a_row_asks_for_and_does_not_get_is_said(case: dict[str, Any], seen: dict[str, Any], said: str) -> None:
    assert wrong(case, {"first_code": case.get("code", 0)}) == []
    assert wrong(case, seen) == [said]


def test_recovery_in_memory_is_asked_of_elastic_jobs_alone() -> None:
    slow = {"back_s": 6.0, "redone": 8}
    assert wrong({"back_s": 0.5}, slow, "restart") == []
    assert len(wrong({"back_s": 0.5}, slow)) == 2


def test_checkpoints_are_damaged(tmp_path: Path) -> None:
    for number in (10, 20):
        (folder := tmp_path / "checkpoints" / f"step-{number:08}").mkdir(parents=True)
        (folder / "small").write_bytes(bytes(10))
        (folder / "large").write_bytes(bytes(100))
    deeds.damage(tmp_path, "flip")
    assert sum((folder / "large").read_bytes()) == 64
    deeds.damage(tmp_path, "truncate")
    assert (folder / "large").stat().st_size == 50
    assert sum((tmp_path / "checkpoints" / "step-00000010" / "large").read_bytes()) == 0
