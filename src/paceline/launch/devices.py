"""How many GPUs this machine has, without loading torch."""

import contextlib
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

ASK_S = 10.0


def gpu_count(environ: Mapping[str, str] | None = None) -> int:
    """The number of GPUs that a process started now would see."""
    environ = os.environ if environ is None else environ
    present = _present()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = [name.strip() for name in visible.split(",") if name.strip()]
    if "-1" in named:  # CUDA ignores the rest of the list
        named = named[: named.index("-1")]
    return min(present, len(named))


def _present() -> int:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        asked = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=ASK_S, check=False)
        if asked.returncode == 0:
            return len(re.findall(r"^GPU \d+:", asked.stdout, re.MULTILINE))
    # In a container only its own device files exist, while the driver may list all devices.
    return sum(1 for entry in Path("/dev").glob("nvidia[0-9]*") if re.fullmatch(r"nvidia\d+", entry.name))
