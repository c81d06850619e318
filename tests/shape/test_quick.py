"""tests/quick.txt, which `./scripts/test --quick` hands to pytest, names real tests; pytest forgives a wrong name."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "tests/quick.txt").read_text().splitlines()


@pytest.mark.parametrize("line", LINES)
def test_a_line_names_tests(line: str) -> None:
    name, _, function = line.removeprefix("--deselect=").partition("::")
    assert (ROOT / name).exists()
    assert not function or re.search(rf"^def {function}\(", (ROOT / name).read_text(), re.MULTILINE)
