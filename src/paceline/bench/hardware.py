"""Where a result was measured."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "paceline", "accelerate", "lightning-fabric", "deepspeed", "mpi4py", "mpich", "tensorflow")


def describe_hardware() -> dict[str, Any]:
    """CPU, cores and memory of this machine. What GPUs there are is told by the workers, which load torch."""
    return {
        "cpu": _first(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int((_first(Path("/proc/meminfo"), "MemTotal") or "0 kB").split()[0]) * 1024,
        "system": platform.platform(),
    }


def describe_versions() -> dict[str, str]:
    """Versions of what takes part, as far as it is installed."""
    found = {"python": platform.python_version(), "paceline": "source tree"}
    for package in (*PACKAGES, "tensorflow-cpu"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _first(file: Path, key: str) -> str | None:
    if not file.exists():
        return None
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None
