"""Another checkout of paceline as a contender: `paceline@PATH`.

Only `import paceline` comes from there. The code that drives and times the contender is this checkout's, so an older
commit is measured in the same way as this one and needs to know nothing about it.
"""

import subprocess
import sys
from importlib import import_module, invalidate_caches
from pathlib import Path

from paceline.errors import UsageError


def sources_in(path: str) -> Path:
    """The folder to import from, given a checkout or its `src`."""
    folder = Path(path).expanduser().resolve()
    for found in (folder / "src", folder):
        if (found / "paceline" / "__init__.py").is_file():
            return found
    raise UsageError(
        f"paceline@{path}: expected the path of a checkout or of its src folder, but there is no "
        f"{folder / 'src' / 'paceline' / '__init__.py'}"
    )


def commit_of(sources: Path) -> str:
    """The commit that is checked out there, marked when files differ from it."""
    try:
        # A copy inside some other repository is not at that one's commit.
        if _git(sources, "ls-files", "--error-unmatch", "paceline/__init__.py") is None:
            return "unknown commit: not in git"
        return _git(sources, "describe", "--always", "--dirty", "--exclude", "*") or "no commit yet"
    except FileNotFoundError:
        return "unknown commit: git is not installed"


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says, or None when it refuses."""
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def import_from(sources: str) -> None:
    """Make `import paceline` find the package in `sources`.

    Modules of this checkout that are already loaded keep what they have imported; only their names become free. So a
    worker first loads everything that measures, and imports `paceline` itself where it builds the contender.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] == "paceline"]:
        del sys.modules[name]
    sys.path.insert(0, sources)
    invalidate_caches()
    found = import_module("paceline").__file__
    if found is None or not Path(found).is_relative_to(sources):
        raise UsageError(f"expected to import paceline from {sources}, got {found}: an import hook takes precedence")
