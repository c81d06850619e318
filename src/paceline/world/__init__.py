"""Which rank this process is, in how large a world, and who says so. Needs no torch until a device is asked for."""

from paceline.world.world import World

__all__ = ["World"]
