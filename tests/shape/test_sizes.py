"""The shape of the source: what fits on a screen stays readable, and some habits are not let in."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"
FILES = sorted(SOURCE.rglob("*.py"))
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
# Words that say nothing about what a thing does.
EMPTY_WORDS = re.compile(r"manager|helper|utils|common", re.IGNORECASE)
# Names that torch's base class gives to methods we must override.
DICTATED = {"_find_common_rank"}
# The places where text is meant for a terminal or a page.
MAY_PRINT = ("cli", "notebook", "plan")
# What makes a tensor on the default device.
CONSTRUCTORS = {one.__name__ for one in _device_constructors()}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_shape(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert not list(complaints(path, text, tree))


def complaints(path: Path, text: str, tree: ast.AST) -> Iterator[str]:
    lines = text.count("\n") + 1
    if lines > MAX_FILE_LINES:
        yield f"{lines} lines, at most {MAX_FILE_LINES}"
    if EMPTY_WORDS.search(name_of(path)):
        yield "the file's name says nothing"
    for function in functions(tree):
        # The body alone: torch's constructors take more arguments than fit, and a drop-in takes them all.
        length = (function.end_lineno or 0) - function.body[0].lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield f"{function.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.ClassDef | Function) and node.name not in DICTATED and EMPTY_WORDS.search(node.name):
            yield f"line {line}: the name {node.name} says nothing"
        if isinstance(node, ast.Global):
            yield f"line {line}: global"
        if isinstance(node, ast.ExceptHandler) and (node.type is None or swallows(node)):
            yield f"line {line}: an exception is swallowed"
        if is_print(node) and path.relative_to(SOURCE).parts[0].removesuffix(".py") not in MAY_PRINT:
            yield f"line {line}: print"
        if is_tensor_anywhere(node) and path.relative_to(SOURCE).parts[0] != "bench":
            yield f"line {line}: a tensor without device=, which torch.set_default_device would move"


def swallows(handler: ast.ExceptHandler) -> bool:
    return all(isinstance(node, ast.Pass) or is_ellipsis(node) for node in handler.body)


def is_ellipsis(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...


def is_print(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


def is_tensor_anywhere(node: ast.AST) -> bool:
    """Whether a tensor is made on whatever device is the default."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and node.func.attr in CONSTRUCTORS
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    )


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def helper_of_all(): return 1", "the name helper_of_all says nothing"),
        ("class TaskManager: x = 1", "the name TaskManager says nothing"),
        ("x = torch.zeros(3, dtype=torch.int64)", "a tensor without device="),
        ("def f():\n    global x\n    x = 1", "global"),
        ("try: f()\nexcept ValueError: pass", "an exception is swallowed"),
        ("try: f()\nexcept: raise", "an exception is swallowed"),
        ("print(1)", "print"),
        ("def f():\n" + "    x = 1\n" * 61, "f has 61 lines, at most 60"),
        ("x = 1\n" * 500, "501 lines, at most 500"),
    ],
)
def test_the_rules_are_seen(source: str, complaint: str) -> None:
    found = list(complaints(SOURCE / "made_up.py", source, ast.parse(source)))
    assert len(found) == 1
    assert complaint in found[0]


def test_a_module_name_means_one_thing() -> None:
    """`reducer.planning` and `memory.planning` would be two things under one name."""
    names = [path.stem for path in FILES if not path.stem.startswith("__")]
    assert not {name for name in names if names.count(name) > 1}


def test_a_class_name_means_one_thing() -> None:
    names = [node.name for path in FILES for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    assert not {name for name in names if names.count(name) > 1}
