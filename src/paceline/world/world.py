"""`World`: the rank of one process, and the size of the world."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.errors import UsageError, WorldError
from paceline.world.environment import Variables

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class World:
    """Which rank this process is and how large the world is.

    `source` says where that was read. `master_addr` and `master_port` are where rank 0 listens; they are empty and
    0 if nothing says so, which is enough only for a world of one.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    source: str = "arguments"
    device_name: str = ""

    def __post_init__(self) -> None:
        for name in ("rank", "size", "local_rank", "local_size", "node_rank", "master_port"):
            number = getattr(self, name)
            lowest = 1 if name.endswith("size") else 0
            if type(number) is not int or number < lowest:
                self._refuse(f"{name}={number!r}", f"a whole number of at least {lowest}")
        for rank, size in (("rank", "size"), ("local_rank", "local_size"), ("local_size", "size")):
            low, high = getattr(self, rank), getattr(self, size)
            if low > high or (low == high and rank != "local_size"):
                relation = "<=" if rank == "local_size" else "<"
                self._refuse(f"{rank}={low} with {size}={high}", f"{rank} {relation} {size}")
        if self.master_port > 65535:
            self._refuse(f"master_port={self.master_port}", "a TCP port of at most 65535")

    def _refuse(self, got: str, expected: str) -> None:
        raise WorldError(f"invalid rank configuration: got {got}, expected {expected} (read from: {self.source})")

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        local_rank: int | None = None,
        master_addr: str | None = None,
        master_port: int | None = None,
    ) -> "World":
        """Read the world from arguments first, then from the variables of whichever launcher started this process.

        Tried in this order, and the first complete set wins: RANK and WORLD_SIZE (torchrun), PET_*, Slurm, SkyPilot,
        MPI, LSF, PBS, TF_CONFIG. With none of them, it is a world of one.
        """
        environ = os.environ if environ is None else environ
        if (rank is None) != (world_size is None):
            raise UsageError(f"rank and world_size belong together: got rank={rank!r}, world_size={world_size!r}")
        for name, number in (("rank", rank), ("world_size", world_size), ("local_rank", local_rank)):
            if number is not None and type(number) is not int:
                raise UsageError(f"{name} must be a whole number, got {number!r} of type {type(number).__name__}")
        from paceline.world.launchers import from_arguments, read_world  # which make values of this class

        if rank is None or world_size is None:
            world = read_world(Variables(environ))
        else:
            given = {} if local_rank is None else {"LOCAL_RANK": str(local_rank)}
            world = from_arguments(Variables({**environ, **given}), rank, world_size)
        if local_rank is not None:
            world = replace(world, local_rank=local_rank, local_size=max(world.local_size, local_rank + 1))
        return replace(
            world,
            master_addr=world.master_addr if master_addr is None else master_addr,
            master_port=world.master_port if master_port is None else master_port,
        )

    @property
    def device(self) -> "torch.device":
        """The device of this rank: the one `init` chose, else CUDA device number `local_rank`, else the CPU."""
        import torch

        if self.device_name:
            return torch.device(self.device_name)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            return torch.device("cpu")
        if count == 1:  # launchers that bind one device to each rank show every rank only that one
            return torch.device("cuda", 0)
        if self.local_rank >= count:
            raise WorldError(
                f"local rank {self.local_rank} has no device of its own: expected more than {self.local_rank} CUDA "
                f"devices, got {count}; start fewer ranks on this machine, or pass device= to paceline.init"
            )
        return torch.device("cuda", self.local_rank)
