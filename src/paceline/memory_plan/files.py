"""Files that someone asked for, looked at before any work is done. Needs no torch."""

import os
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import UsageError

PICTURES = (".png", ".svg", ".pdf")


def require_place(name: str, file: Path) -> None:
    """Refuse a file that could not be written. A folder that is not there is a slip of the pen more often than not."""
    if not file.parent.is_dir():
        raise UsageError(f"{name}={str(file)!r}: expected a file in a folder that exists, there is no {file.parent}")
    if file.is_dir():
        raise UsageError(f"{name}={str(file)!r}: expected a file, this is a folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"{name}={str(file)!r}: expected a file that may be written")


def require_picture(name: str, file: Path) -> None:
    """The same for a chart, which needs matplotlib and an ending that says how to draw it."""
    if file.suffix.lower() not in PICTURES:
        raise UsageError(f"{name}={str(file)!r}: expected a file that ends in {', '.join(PICTURES)}")
    require_place(name, file)
    if find_spec("matplotlib") is None:
        raise UsageError(f"{name}: a chart needs matplotlib, which is not installed: pip install 'paceline[bench]'")
