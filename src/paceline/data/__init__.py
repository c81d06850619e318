"""Dealing samples to ranks."""

from paceline.data.sampler import DistributedSampler

__all__ = ["DistributedSampler"]
