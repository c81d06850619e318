"""Another checkout of paceline beside this one."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.bench.checkout import commit_of, sources_in
from paceline.errors import UsageError


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A checkout with a paceline that has hardly anything."""
    package = tmp_path / "other" / "src" / "paceline"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("Agreement = 'of the other checkout'\n")
    return tmp_path / "other"


def test_a_checkout_is_named_by_its_folder_or_its_sources(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sources_in(str(other)) == sources_in(str(other / "src")) == other / "src"
    monkeypatch.chdir(other)
    assert sources_in(".") == other / "src"
    with pytest.raises(UsageError, match=r"paceline@nowhere: expected the path of a checkout .*/nowhere/src/paceline"):
        sources_in("nowhere")


def test_a_folder_that_is_in_no_repository_has_no_commit(other: Path) -> None:
    assert commit_of(other / "src").startswith("unknown commit")


def test_the_commit_of_a_checkout_is_found(other: Path) -> None:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(other), *command], check=True)
    clean = commit_of(other / "src")
    copy = other / "copy" / "src" / "paceline"
    copy.mkdir(parents=True)
    (copy / "__init__.py").touch()
    assert commit_of(copy.parent) == "unknown commit: not in git"
    assert len(clean) >= 7 and int(clean, 16) >= 0
    (other / "src" / "paceline" / "__init__.py").write_text("changed = True\n")
    assert commit_of(other / "src") == f"{clean}-dirty"


def test_what_is_loaded_stays_and_what_is_imported_later_is_the_other_ones(other: Path) -> None:
    code = """
import sys
from paceline.bench.checkout import import_from
from paceline.bench.machinery import MachinerySpec

import_from(sys.argv[1])
import paceline
print(paceline.Agreement)
print(MachinerySpec().step().ranks)
try:
    import paceline.errors
except ImportError:
    print("it has no more than it has")
"""
    command = [sys.executable, "-c", code, str(other / "src")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout.splitlines() == ["of the other checkout", "1", "it has no more than it has"]
