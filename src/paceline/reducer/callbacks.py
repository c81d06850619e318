"""Callbacks about a replica's backwards."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackwardCallbacks:
    """Called by the reducer, on the thread that detects the event, in the order given."""

    finished: tuple[Callable[[], None], ...] = ()  # all gradients of a backward are in their buckets, or are reduced
    failed: tuple[Callable[[], None], ...] = ()  # a backward that was to be reduced has raised
