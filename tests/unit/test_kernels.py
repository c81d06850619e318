"""What decides which kernels torch runs, asked and set."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.kernels import differences, kernel_settings, use_float32_precision

BACKENDS: Any = torch.backends
NAME = "float32 in mkldnn.matmul"


@pytest.fixture
def mkldnn_matmul() -> Iterator[Any]:
    place = BACKENDS.mkldnn.matmul
    before = place.fp32_precision
    yield place
    place.fp32_precision = before


def test_float32_precision_is_told_whichever_way_it_was_set(mkldnn_matmul: Any) -> None:
    before = kernel_settings()
    assert before[NAME] == "ieee"
    # From here on torch refuses to answer to its older names.
    mkldnn_matmul.fp32_precision = "bf16"
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    after = kernel_settings()
    assert differences(before, after) == [f"{NAME}: ieee and bf16"]
    use_float32_precision(before)
    assert kernel_settings() == before
    use_float32_precision(after)
    assert kernel_settings() == after
