"""Nothing that comes from a file or another process is unpickled: unpickling runs whatever code it holds."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "paceline"
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
# Of torch, torch.distributed, numpy and multiprocessing: what unpickles, whatever it is asked on.
CALLS = {
    "load_object", "loads", "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list", "send_object", "recv_object", "_object_to_tensor", "_tensor_to_object",
    "Unpickler", "find_class",
}  # fmt: skip
READ_TEXT = {"json", "tomllib"}  # modules whose `loads` reads text
# DCP's own format is made of pickles. It is read with trust_pickle=True alone, by torch (`checkpoint/dcp.py`).
MAY_READ_DCP = "checkpoint/dcp.py"
MAY_CONNECT = {"Client", "Connection", "wait"}
CONNECTIONS = {"recv"}  # of multiprocessing, whose `send` and `recv` pickle; sockets have a recv of their own
SOCKETS = {"launch/rank_processes.py", "notebook/rank_kernels/connection.py"}  # a socket, and a session of Jupyter's


def complaints(name: str, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        line = getattr(node, "lineno", 0)
        named = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if found := {one.partition(".")[0] for one in named} & MODULES:
            yield f"line {line}: {min(found)} is imported"
        if isinstance(node, ast.ImportFrom) and node.module == "multiprocessing.connection":
            for one in node.names:
                if one.name not in MAY_CONNECT:
                    yield f"line {line}: {one.name} of multiprocessing.connection"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from (f"line {line}: {why}" for why in _wrong_call(name, node, node.func))


def _wrong_call(name: str, call: ast.Call, function: ast.Attribute) -> Iterator[str]:
    of = ast.unparse(function.value)
    given = {one.arg: one.value for one in call.keywords}
    if function.attr in CALLS and of not in READ_TEXT:
        yield f"{of}.{function.attr}()"
    if of == "torch" and function.attr == "load":
        yield "torch.load(), which unpickles"
    if isinstance(weights := given.get("weights_only"), ast.Constant) and weights.value is False:
        yield "weights_only=False"
    pickles = given.get("allow_pickle")
    if (of in ("numpy", "np") and function.attr in ("load", "fromfile")) or (
        "read_array" in function.attr
        and not (isinstance(pickles, ast.Constant) and pickles.value is False)
        and not function.attr.startswith("read_array_header")
    ):
        yield f"{of}.{function.attr}() without allow_pickle=False"
    if function.attr in CONNECTIONS and not call.args and name not in SOCKETS:
        yield f"{of}.recv(), as of a multiprocessing connection; use bench/messages.py"
    if function.attr in ("FileSystemReader",) and name != MAY_READ_DCP:
        yield "a reader of DCP's format"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_is_unpickled(path: Path) -> None:
    assert not list(complaints(str(path.relative_to(SOURCE)), path.read_text()))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import marshal as m",
        "dist.broadcast_object_list([x])",
        "torch.distributed.all_gather_object(a, b)",
        "torch.load(path, weights_only=True)",
        "load(path, weights_only=False)".replace("load(", "x.load("),
        "numpy.load(path)",
        "npy.read_array(file)",
        "connection.recv()",
        "from multiprocessing.connection import Listener",
        "ForkingPickler.loads(x)",
    ],
)
def test_it_is_seen(source: str) -> None:
    assert list(complaints("made_up.py", source))


@pytest.mark.parametrize("source", ["json.loads(x)", "npy.read_array(file, allow_pickle=False)", "control.recv(4096)"])
def test_other_things_are_left_alone(source: str) -> None:
    assert not list(complaints("made_up.py", source))


def test_the_one_import_that_unpickles_asks_first() -> None:
    text = (SOURCE / MAY_READ_DCP).read_text()
    assert text.count("FileSystemReader(path)") == 1
    assert text.index("if not trust_pickle:") < text.index("FileSystemReader(path)")
    assert "trust_pickle: bool = False" in text


def test_nothing_turns_the_tokens_of_ray_off() -> None:
    assert not [path for path in SOURCE.rglob("*.py") if "RAY_AUTH" in path.read_text()]
