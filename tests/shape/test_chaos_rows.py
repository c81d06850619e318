"""The matrix of faults (`scripts/chaos`) is whole, and the tests that it names exist."""

import ast
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from paceline.faults import parse

ROOT = Path(__file__).parents[2]
CASES = runpy.run_path(str(ROOT / "benchmarks" / "chaos" / "cases.py"))["CASES"]


@cache
def functions(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}


def test_every_row_is_there_once() -> None:
    assert [case.id for case in CASES] == [f"F{number}" for number in range(1, 39)]
    ci = [case.id for case in CASES if case.ci]
    assert ci == ["F1", "F2", "F3", "F7", "F18", "F20", "F22", "F24", "F26", "F28", "F29", "F36"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.id))
def test_a_row_can_be_run(case: Any) -> None:
    assert case.tests or case.faults or case.signals or case.hosts or case.clock
    assert case.tests or not case.ci, "what every run of the suite shows is shown by tests"
    for node in case.tests:
        file, _, name = node.partition("::")
        assert (ROOT / file).is_file() and (not name or name in functions(file)), node
    for fault in case.faults:
        assert parse(fault).rank < case.ranks
