"""When, where and with what a run was made."""

import os
import platform
import time
from pathlib import Path

import torch

import paceline

CPU_INFO = Path("/proc/cpuinfo")


def origin(device: torch.device) -> dict[str, str]:
    """For result.json and the report: date, machine and versions, each as a line of text."""
    found = {"paceline": paceline.__version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": ", ".join((cpu_model(), f"{len(os.sched_getaffinity(0))} cores", *gpus(device))),
        "versions": ", ".join(f"{name} {version}" for name, version in found.items()),
    }


def cpu_model() -> str:
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()  # the kernel of ARM names no model


def gpus(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return []
    return [f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(device)}"]
