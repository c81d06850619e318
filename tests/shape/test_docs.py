"""What the documents say is run or looked up."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
REFERENCE = re.compile(r"`([\w./-]+\.py):([A-Za-z_][\w.]*)`")
PATH = re.compile(r"`((?:src|tests|scripts|examples|\.ci)/[\w./-]+)`")
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"]


def text_of(document: str) -> str:
    # A missing document is one failing test below, not an error while tests are collected.
    file = ROOT / document
    return file.read_text() if file.exists() else ""


def python_blocks() -> list[str]:
    return BLOCK.findall(text_of("README.md"))


def references() -> list[tuple[str, str]]:
    return REFERENCE.findall(text_of("ARCHITECTURE.md"))


@pytest.mark.parametrize("number", range(len(python_blocks())))
def test_a_python_block_of_the_readme_runs(number: int, tmp_path: Path) -> None:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {name: value for name, value in os.environ.items() if name not in launcher}
    environ |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "error", "-c", python_blocks()[number]]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr


def resolves(file: Path, name: str) -> bool:
    """Whether `name` (or `Class.method`) is defined in `file`."""
    scope: ast.AST = ast.parse(file.read_text())
    for part in name.split("."):
        found = [node for node in ast.iter_child_nodes(scope) if part in defined_names(node)]
        if not found:
            return False
        scope = found[0]
    return True


def defined_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def find(path: str) -> Path:
    """Paths are written from the root of the repository or from the package."""
    return next((base / path for base in (ROOT, ROOT / "src" / "paceline") if (base / path).exists()), ROOT / path)


@pytest.mark.parametrize("reference", references(), ids=":".join)
def test_a_reference_of_the_architecture_resolves(reference: tuple[str, str]) -> None:
    path, name = reference
    assert find(path).is_file(), f"{path} does not exist"
    assert resolves(find(path), name), f"{path} defines no {name}"


def test_the_architecture_has_references() -> None:
    assert references()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_in_documents_exist(document: str) -> None:
    assert text_of(document), f"{document} is missing or empty"
    missing = [path for path in PATH.findall(text_of(document)) if not (ROOT / path).exists()]
    assert not missing


def test_references_are_resolved_by_definition() -> None:
    file = Path(__file__)
    assert resolves(file, "resolves")
    assert resolves(file, "ROOT")
    assert resolves(ROOT / "tests" / "conftest.py", "Belongings.now")
    assert not resolves(file, "nothing")
    assert not resolves(ROOT / "tests" / "conftest.py", "Belongings.later")
