"""The states of random number generators."""

import random
import sys
from typing import Any

import torch


def rng_state() -> dict[str, Any]:
    """The generators of this rank: Python's, torch's for the CPU and the current CUDA device, numpy's if loaded.

    They differ between ranks: save them as `PerRank(rng_state())`.
    """
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue where `rng_state` was taken. Generators that are not there on this machine are left out."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
