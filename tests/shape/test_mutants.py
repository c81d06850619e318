"""The mutants fit the source: each would change one place."""

from pathlib import Path

import pytest

import paceline
from tests.mutants.table import MUTANTS, Mutant

SOURCE = Path(paceline.__file__).parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place(mutant: Mutant) -> None:
    assert (SOURCE / mutant.file).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old


def test_names_are_told_apart() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
