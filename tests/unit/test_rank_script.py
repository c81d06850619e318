"""A script that a launcher starts runs as Python would run it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = {
    "what it sees of itself": """
        import pickle, sys
        class Own: pass
        print(sys.argv, sys.path[0], __name__, __file__, __spec__, __package__, __doc__)
        print(sys.modules["__main__"].Own is Own, pickle.loads(pickle.dumps(Own())).__class__ is Own)
    """,
    "its own modules": "import beside; print(beside.here)",
    "processes that it spawns": """
        import multiprocessing
        def square(x): return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool: print(pool.map(square, [3]))
    """,
    "an error": """
        def fail(): raise ValueError("as asked")
        try: 1 / 0
        except ZeroDivisionError: fail()
    """,
    "an error that has a cause": """
        try: [][1]
        except IndexError as error: raise KeyError("no such") from error
    """,
    "a hook for errors": """
        import atexit, sys
        sys.excepthook = lambda kind, error, trace: print("hook", kind.__name__, trace.tb_lineno)
        atexit.register(lambda: print("end", hasattr(sys, "last_type")))
        raise OSError("as asked")
    """,
    "no Python": "this is no Python",
    "an exit code": "import sys; sys.exit(7)",
    "an exit with words": "raise SystemExit('so it ends')",
    "nothing": "",
}


def outcome(command: list[str], folder: Path) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=folder, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_python_runs_it(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    lines = SCRIPTS[name].split("\n        ")
    (folder / "train.py").write_text("\n".join(lines))
    (folder / "beside.py").write_text("here = 'yes'")
    for script in ("scripts/train.py", str(folder / "train.py")):
        by_python = outcome([script, "--lr", "1"], tmp_path)
        assert outcome(["-m", "paceline.rank_script", script, "--lr", "1"], tmp_path) == by_python


def test_a_module_and_a_folder_run(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__main__.py").write_text("import sys; print(__name__, sys.argv[1:])")
    for words in (["-m", "package"], ["package"]):
        assert outcome(["-m", "paceline.rank_script", *words, "a"], tmp_path) == (0, "__main__ ['a']\n", "")


def test_an_interrupt_ends_it_by_the_signal(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    codes = [outcome([*words, str(script)], tmp_path)[0] for words in ([], ["-m", "paceline.rank_script"])]
    assert codes == [-2, -2]
