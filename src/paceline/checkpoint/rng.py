"""The states of random number generators, as checkpoints save them."""

from paceline.randomness import rng_state, set_rng_state

__all__ = ["rng_state", "set_rng_state"]
