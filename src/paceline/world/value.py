"""`World`: one process's place among all, as a value."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.errors import UsageError, WorldError
from paceline.world.environment import Variables, node_of
from paceline.world.launchers import read_place

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class World:
    """Which rank this process is and how large the world is.

    `source` says where that was read. `master_addr` and `master_port` are where rank 0 can be met; they are empty and
    0 when nobody said, which only a world of one can live with.
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
        raise WorldError(f"this cannot be a world: got {got}, expected {expected} (read from: {self.source})")

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

        Asked in this order, and the first complete set wins: RANK and WORLD_SIZE (torchrun), PET_*, Slurm, SkyPilot,
        MPI, LSF, PBS, TF_CONFIG. With none of them, it is a world of one.
        """
        env = Variables(os.environ if environ is None else environ)
        if (rank is None) != (world_size is None):
            raise UsageError(f"rank and world_size belong together: got rank={rank!r}, world_size={world_size!r}")
        for name, number in (("rank", rank), ("world_size", world_size), ("local_rank", local_rank)):
            if number is not None and type(number) is not int:
                raise UsageError(f"{name} must be a whole number, got {number!r} of type {type(number).__name__}")
        if rank is None or world_size is None:
            world = cls(**read_place(env)._asdict())
        else:
            world = cls._from_arguments(env, rank, world_size, local_rank)
        return world._replaced(local_rank, master_addr, master_port)

    @classmethod
    def _from_arguments(cls, env: Variables, rank: int, size: int, local_rank: int | None) -> "World":
        local_rank = env.integer("LOCAL_RANK", rank) if local_rank is None else local_rank
        local_size = env.integer("LOCAL_WORLD_SIZE", max(size, local_rank + 1))
        return cls(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=env.integer(env.first("GROUP_RANK", "NODE_RANK"), node_of(rank, local_rank, local_size)),
            master_addr=env.text("MASTER_ADDR"),
            master_port=env.port("MASTER_PORT"),
            source="arguments",
        )

    def _replaced(self, local_rank: int | None, master_addr: str | None, master_port: int | None) -> "World":
        world = self
        if local_rank is not None and local_rank != self.local_rank:
            world = replace(world, local_rank=local_rank, local_size=max(self.local_size, local_rank + 1))
        if master_addr is not None:
            world = replace(world, master_addr=master_addr)
        if master_port is not None:
            world = replace(world, master_port=master_port)
        return world

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
