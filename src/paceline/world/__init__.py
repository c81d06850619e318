"""The rank of this process, the size of the world, and where they were read. Needs no torch until a device is asked
for."""

from paceline.world.world import World

__all__ = ["World"]
