"""How many processes each axis of parallelism has, and which of them a rank is. Pure: imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from trainer_svc.compute_config import ParallelConfig

__all__ = ["MESH_AXES", "ParallelDims"]

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the device mesh, the slowest first: ranks beside each other, on one host, share the axis that talks most."""


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """A mesh of processes; every rank has a place on each axis.

    Attributes:
        dp_replicate: Copies of the sharded model.
        dp_shard: Processes that one copy's weights, gradients and optimizer state are cut into (FSDP2).
        tp: Processes that share each matrix product.
        cp: Processes that share each packed row of tokens.
        pp: Stages that share the layers.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in MESH_AXES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give 1 process or more")

    @classmethod
    def of(cls, config: ParallelConfig, world_size: int) -> Self:
        """The mesh of a job.

        Args:
            config: The table `trainer.parallel`; a `dp_shard` of -1 takes the processes that the other axes leave.
            world_size: Processes that there are.

        Raises:
            ValueError: if the axes do not make up `world_size`.
        """
        fixed = config.dp_replicate * config.tp * config.cp * config.pp
        if config.dp_shard == -1:
            if world_size % fixed:
                raise ValueError(
                    f"{world_size} processes are no multiple of dp_replicate x tp x cp x pp = {fixed}: change"
                    " trainer.parallel, or start a multiple of them (torchrun --nproc-per-node)"
                )
            dp_shard = world_size // fixed
        else:
            dp_shard = config.dp_shard
        dims = cls(config.dp_replicate, dp_shard, config.tp, config.cp, config.pp)
        if dims.world_size != world_size:
            raise ValueError(
                f"trainer.parallel ({dims}) makes {dims.world_size} processes, but there are {world_size}: start that many"
                " (torchrun --nproc-per-node), or let dp_shard = -1 take the rest"
            )
        return dims

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in the order of `MESH_AXES`."""
        return tuple(getattr(self, name) for name in MESH_AXES)

    @property
    def data_parallel(self) -> int:
        """Processes with different rows: `dp_replicate` x `dp_shard`; the others repeat the rows of one of them."""
        return self.dp_replicate * self.dp_shard

    def place(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis, counted from 0; ranks count the last axis of `MESH_AXES` fastest."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is none of {self.world_size}")
        place: dict[str, int] = {}
        for name in reversed(MESH_AXES):
            rank, place[name] = divmod(rank, getattr(self, name))
        return place

    def data_rank(self, rank: int) -> int:
        """Which of the `data_parallel` shares of a batch a rank trains on."""
        place = self.place(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def ranks_of(self, data_rank: int) -> Iterable[int]:
        """Ranks that train on the same share of a batch, in ascending order."""
        return (rank for rank in range(self.world_size) if self.data_rank(rank) == data_rank)

    def __str__(self) -> str:
        """Axes of more than one process, such as ``dp_shard 4 x tp 2``; ``one process`` where there is none."""
        return (
            " x ".join(f"{name} {getattr(self, name)}" for name in MESH_AXES if getattr(self, name) > 1)
            or "one process"
        )
