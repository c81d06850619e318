"""Load the object that a name stands for: `module:NAME`, or `FILE.py:NAME` for code outside of the package."""

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from paceline.errors import UsageError


def load_named(text: str) -> Any:
    """The object that `text` names; None if its file has none of that name. A file is loaded once."""
    place, _, name = text.rpartition(":")
    if not place.endswith(".py"):
        return getattr(import_module(place), name)
    path = Path(place).resolve()
    key = f"loaded from {path}"
    if key not in sys.modules:
        spec = spec_from_file_location(key, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise UsageError(f"{text}: there is no file {path}")
        sys.modules[key] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[key])
    return getattr(sys.modules[key], name, None)
