"""Which rank this process is, in how large a world, and how it was told. Needs no torch until a device is asked for."""

from paceline.world.value import World

__all__ = ["World"]
