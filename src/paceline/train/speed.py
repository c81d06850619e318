"""What a GPU could do at most, and which part of that a run uses: MFU, the utilisation of its model's operations."""

import torch

from paceline.train.sizes import Shape

# Dense bfloat16 operations per second, from the makers' data sheets; the first name that fits counts.
PEAK = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "4090": 165e12,
    "3090": 71e12,
    "L4": 121e12,
}


def operations_per_token(parameters: int, shape: Shape) -> int:
    """Of forward and backward: 6 for every parameter, and those of attention over half the context."""
    return 6 * parameters + 6 * shape.layers * shape.width * shape.context


def utilisation(
    tokens_per_second: float | None, parameters: int, shape: Shape, device: torch.device, ranks: int
) -> float | None:
    """The part of the peak that the model's own operations took. None where the peak is not known."""
    if tokens_per_second is None or device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    peak = next((peak for known, peak in PEAK.items() if known in name), None)
    return None if peak is None else tokens_per_second * operations_per_token(parameters, shape) / (peak * ranks)
