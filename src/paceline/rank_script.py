"""Runs a script as `python script.py` does, in a process whose heartbeat tells its launcher that Python runs.

So a launcher can watch every script, even one that never uses this library:
`python -m paceline.rank_script train.py --lr 1`.
"""

import builtins
import runpy
import sys
from importlib.machinery import SourceFileLoader
from io import open_code
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from paceline.heartbeat import begin_heartbeat
from paceline.rank_report import inherited_progress


def main() -> None:
    """The arguments are a script, or -m and a module, followed by the script's own arguments."""
    begin_heartbeat(inherited_progress())
    if sys.argv[1] == "-m":
        name, sys.argv = sys.argv[2], sys.argv[2:]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    sys.argv = sys.argv[1:]
    script = Path(sys.argv[0])
    if script.is_dir():
        runpy.run_path(str(script), run_name="__main__")
        return
    sys.path[0] = str(script.resolve().parent)
    path = str(script.absolute())
    run(path, new_main(path))


def new_main(path: str) -> ModuleType:
    """The module `__main__` of a script. It has no spec, so processes that it spawns find the script by its path."""
    module = ModuleType("__main__")
    module.__file__, module.__loader__ = path, SourceFileLoader("__main__", path)
    module.__dict__.update(__builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module
    return module


def run(path: str, module: ModuleType) -> None:
    """Run the script. Its errors are shown without the frames of this module."""
    try:
        with open_code(path) as stream:
            code = compile(stream.read(), path, "exec")
        exec(code, module.__dict__)
    except Exception as error:  # noqa: BLE001 - Python's own way is to show it and to end
        trace = error.__traceback__
        show_as_python_does(error.with_traceback(None if trace is None else trace.tb_next))


def show_as_python_does(error: Exception) -> NoReturn:
    """Report an uncaught error as Python does."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.excepthook(type(error), error, error.__traceback__)
    sys.exit(1)


if __name__ == "__main__":
    main()
