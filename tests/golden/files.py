"""Where the results are kept: one line per case, so that a change is a line of a diff."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GOLDEN = HERE / "golden.json"
STORED = HERE / "stored.json"  # what comes of the stored checkpoint and capsules


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(path: Path, values: Mapping[str, Any]) -> None:
    lines = (f"{json.dumps(name)}: {json.dumps(values[name], sort_keys=True)}" for name in sorted(values))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
