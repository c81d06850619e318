"""The settings that decide which kernels torch runs. Other kernels may add the same numbers in another order."""

import os
from collections.abc import Mapping
from typing import Any

import torch


def kernel_settings(device: torch.device | None = None) -> dict[str, str]:
    """Everything known to change the bits of a result, by name. Plain text, to be compared and saved."""
    found = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        # torch has no function for this: a subnormal number shows whether it is flushed to zero.
        "flush denormal": torch.full((), 1e-40, dtype=torch.float32, device="cpu").mul(1.0).item() == 0.0,
    }
    gpu = device is not None and device.type == "cuda"
    found |= {name: _precision(place) for name, place in _float32_places(gpu=gpu).items()}
    if gpu:
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "cudnn.enabled": torch.backends.cudnn.enabled,
            "cudnn.deterministic": torch.backends.cudnn.deterministic,
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "float16 sums in float16": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            "bfloat16 sums in bfloat16": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
            "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
            "sdp kernels": _attention_kernels(),
        }
    return {name: str(value) for name, value in found.items()}


def use_kernel_settings(settings: Mapping[str, str], device: torch.device) -> list[str]:
    """Run the kernels that kernel_settings() described in another process. Returns what is still different."""
    if settings.get("threads", "").isdecimal():
        torch.set_num_threads(max(1, int(settings["threads"])))
    if settings.get("deterministic algorithms") == "True":
        torch.use_deterministic_algorithms(True)
    use_float32_precision(settings)
    if settings.get("flush denormal") == "True":
        torch.set_flush_denormal(True)
    return differences(settings, kernel_settings(device)) if settings else []


def use_float32_precision(settings: Mapping[str, str]) -> None:
    """Set the precision of float32 products to that of `settings`, which kernel_settings() returned."""
    for name, place in _float32_places(gpu=True).items():
        if name in settings and settings[name] != _precision(place):
            place.fp32_precision = settings[name]


def _float32_places(*, gpu: bool) -> dict[str, Any]:
    """Where torch keeps how exactly float32 is multiplied.

    Not torch.get_float32_matmul_precision() and allow_tf32: they raise an error once one of these has been set.
    """
    backends: Any = torch.backends
    places = {"mkldnn.matmul": backends.mkldnn.matmul, "mkldnn.conv": backends.mkldnn.conv}
    if gpu:
        places |= {"cuda.matmul": backends.cuda.matmul, "cudnn.conv": backends.cudnn.conv}
        places |= {"cudnn.rnn": backends.cudnn.rnn}
    return {f"float32 in {name}": place for name, place in places.items()}


def _precision(place: Any) -> str:
    return "ieee" if place.fp32_precision == "none" else str(place.fp32_precision)


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """What differs between the settings of two machines, as text."""
    names = [*one, *(name for name in other if name not in one)]
    return [
        f"{name}: {one.get(name, 'unknown')} and {other.get(name, 'unknown')}"
        for name in names
        if one.get(name) != other.get(name)
    ]


def _attention_kernels() -> str:
    cuda = torch.backends.cuda
    on = {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
    }
    return " ".join(name for name, enabled in on.items() if enabled)
