"""What the documents say is run or looked up."""

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
REFERENCE = re.compile(r"`([\w./-]+\.py):([A-Za-z_][\w.]*)`")
PATH = re.compile(r"`((?:src|tests|scripts|examples|\.ci)/[\w./-]+)`")
PAGES = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", *PAGES]


def text_of(document: str) -> str:
    # A missing document is one failing test below, not an error while tests are collected.
    file = ROOT / document
    return file.read_text() if file.exists() else ""


def python_blocks(document: str) -> list[str]:
    # Importing these takes seconds; tests/clients trains with their blocks.
    frameworks = re.compile("lightning|transformers")
    return [block for block in BLOCK.findall(text_of(document)) if not frameworks.search(block)]


def references() -> list[tuple[str, str]]:
    return REFERENCE.findall(text_of("ARCHITECTURE.md"))


# For each document a process loads torch, and each block runs in a fork of it, as the first that uses torch there.
RUN_BLOCKS = """
import json, os, sys, traceback
import torch, torch.distributed, torch.utils.data
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # makes torch load its compiler, for a second
codes = []
for number, block in enumerate(json.load(sys.stdin)):
    pid = os.fork()
    if not pid:
        try:
            os.mkdir(str(number))
            os.chdir(str(number))
            os.dup2(os.open("output", os.O_WRONLY | os.O_CREAT), 1)
            os.dup2(1, 2)
            exec(compile(block, f"block {number}", "exec"), {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def run_blocks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[int]]]:
    """Runs the blocks of a document, once: a folder with one for each block, and the exit codes."""
    return cache(lambda document: run_in(tmp_path_factory.mktemp("documents"), document))


def run_in(folder: Path, document: str) -> tuple[Path, list[int]]:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environ = {name: value for name, value in os.environ.items() if name not in launcher}
    environ |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_BLOCKS],
        input=json.dumps(python_blocks(document)),
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("document", "number"),
    [(document, number) for document in ("README.md", *PAGES) for number in range(len(python_blocks(document)))],
)
def test_a_python_block_of_the_documents_runs(
    document: str, number: int, run_blocks: Callable[[str], tuple[Path, list[int]]]
) -> None:
    folder, codes = run_blocks(document)
    assert codes[number] == 0, (folder / str(number) / "output").read_text()


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
