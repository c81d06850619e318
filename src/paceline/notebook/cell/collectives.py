"""Which collectives a cell would call, read from its code: where only some ranks run it, the others are missing."""

import ast
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import dedent

from paceline.notebook.cell.source import Line, logical_lines, plain

# Names that mean a collective wherever they stand.
_DISTINCT = re.compile(
    r"(?:all_?reduce|all_?gather|all_to_all|reduce_scatter)(?:_[a-z_]+)?|(?:broadcast|scatter|gather)_object(?:_list)?"
    r"|(?:monitored_)?barrier|new_(?:sub)?groups?(?:_by_enumeration)?|init_process_group|init_device_mesh|split_group"
    r"|DistributedDataParallel|FullyShardedDataParallel|fully_shard|sync_gradients"
)
# Names that mean other things too, and a collective in these modules.
_AMBIGUOUS = re.compile(r"broadcast|reduce|gather|scatter|i?send|i?recv|batch_isend_irecv|(?:send|recv)_object_list")
_HOMES = ("dist", "torch.distributed", "torch.distributed.distributed_c10d", "paceline")
# What short names mean if the cell does not say where they come from.
_USUAL = {
    "DDP": "torch.nn.parallel.DistributedDataParallel",
    "FSDP": "torch.distributed.fsdp.FullyShardedDataParallel",
    "broadcast": "dist.broadcast",
}
_RUNS_PYTHON = re.compile(r"%{1,2}(?:time|timeit|capture|prun|memit|rank|distributed)(?![^\W\d])(.*)", re.DOTALL)
_OPTIONS = re.compile(r"(?:\s*-[a-zA-Z](?:\s*\d+)?(?=\s))*\s*")
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_With = ast.With | ast.AsyncWith


@dataclass(frozen=True, slots=True)
class Call:
    """A collective that a cell calls, and the line of the cell that does."""

    name: str
    line: int


def collectives_in(code: str) -> list[Call]:
    """The collectives that running `code` calls, by line, as far as they can be read from it.

    A function counts if the cell uses it too, and a backward only outside no_sync(). Calls over a group of their own
    do not count: it may consist of just the ranks that run the cell. Empty if the code is no Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd strings: whoever runs the cell says it
            tree = ast.parse(_as_python(code))
            return sorted(_Reader(tree).found, key=lambda call: call.line)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: brackets upon brackets
        return []


def _as_python(code: str) -> str:
    """The cell with its lines where they were, and something harmless in the place of IPython's syntax."""
    text, begins = [], True
    for line in logical_lines(plain(code)):
        if begins and line.command.startswith("%%"):
            if not _RUNS_PYTHON.match(line.command):
                return ""
            text.append("\n" * line.text.count("\n"))
        elif line.command:
            text.append(line.target + _statement(line) + "\n" * line.text.count("\n"))
        else:
            text.append(line.text)
        begins = begins and line.says_nothing
    return dedent("".join(text))


def _statement(line: Line) -> str:
    found = _RUNS_PYTHON.match(line.command)
    if found is None:
        return "None"
    statement = _OPTIONS.sub("", found[1], count=1)
    try:
        ast.parse(line.target.lstrip() + statement)
    except SyntaxError:
        return "None"
    return statement or "None"


class _Reader(ast.NodeVisitor):
    """Walks what runs when the cell does: not the body of a function, unless what runs has its name."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: set[Call] = set()
        self._origins = dict(_origins(tree))
        self._bodies = _bodies(tree)
        self._read: set[tuple[int, bool]] = set()
        self._quiet = False  # inside no_sync()
        self.visit(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._define(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._define(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all([*node.decorator_list, *node.body])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit_all([] if node.value is None else [node.value])

    def visit_With(self, node: ast.With) -> None:
        self._enter(node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        self._enter(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._use(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._use(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = self._collective(node)
        if name is not None:
            self.found.add(Call(name, node.func.end_lineno or node.lineno))
        self.generic_visit(node)

    def _define(self, node: _Function) -> None:
        defaults = [default for default in node.args.kw_defaults if default is not None]
        self._visit_all([*node.decorator_list, *node.args.defaults, *defaults])

    def _enter(self, node: _With) -> None:
        self._visit_all(node.items)
        before = self._quiet
        self._quiet = before or any(_last_name(item.context_expr) == "no_sync" for item in node.items)
        self._visit_all(node.body)
        self._quiet = before

    def _use(self, name: str) -> None:
        for body in self._bodies.get(name, ()):
            # A function that was read inside no_sync() may be used outside of it too.
            if (mark := (id(body), self._quiet)) not in self._read:
                self._read.add(mark)
                self._visit_all(body)

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _collective(self, node: ast.Call) -> str | None:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
            return None if self._quiet else "backward"
        if any(word.arg in ("group", "process_group") and not _is_world(word.value) for word in node.keywords):
            return None
        name = _dotted(node.func)
        first, _, rest = name.partition(".")
        if not rest and first in self._bodies:
            return None  # a function of the cell, which is read itself
        origin = self._origins.get(first, _USUAL.get(first, first) if not rest else first)
        home, _, last = f"{origin}.{rest}".removesuffix(".").rpartition(".")
        if _DISTINCT.fullmatch(last) or (home in _HOMES and _AMBIGUOUS.fullmatch(last)):
            return last
        return None


def _origins(tree: ast.Module) -> Iterable[tuple[str, str]]:
    """What the names that the cell imports stand for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.asname, name.name) for name in node.names if name.asname)
        elif isinstance(node, ast.ImportFrom):
            yield from ((name.asname or name.name, f"{node.module}.{name.name}") for name in node.names)


def _bodies(tree: ast.Module) -> dict[str, list[list[ast.stmt]]]:
    """What runs when a function of the cell is called, or a class of the cell is put to use, by its name."""
    found: dict[str, list[list[ast.stmt]]] = defaultdict(list)
    for node in ast.walk(tree):
        if isinstance(node, _Function):
            found[node.name].append(node.body)
        elif isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if isinstance(item, _Function)]
            # Nobody calls these by their names.
            found[node.name] += [item.body for item in methods if item.name.startswith("__") or item.name == "forward"]
    return found


def _dotted(node: ast.expr) -> str:
    """`torch.distributed.barrier` of that expression; what is no name in it is left out."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _last_name(node: ast.expr) -> str:
    return _dotted(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def _is_world(node: ast.expr) -> bool:
    return (isinstance(node, ast.Constant) and node.value is None) or _dotted(node).endswith("WORLD")
