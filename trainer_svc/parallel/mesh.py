"""The processes of one trainer: who shares the weights, who shares a row of tokens, who has other rows."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainer_svc.compute_config import ParallelConfig
from trainer_svc.parallel.dims import MESH_AXES, ParallelDims
from trainer_svc.parallel.meeting import fresh_store
from trainer_svc.parallel.ranks import ALONE, Ranks

__all__ = ["SINGLE", "Mesh", "join", "make_mesh"]

WEIGHT_AXES = ("pp", "dp_replicate", "fsdp", "tp")
"""Axes of the device mesh that weights are laid out on; `fsdp` is `dp_shard` x `cp`, as all of these see one copy."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """This process's place among the processes of a trainer.

    Attributes:
        dims: How many there are on each axis.
        rank: This one, counted over all.
        device: Where it computes: "cpu", or its own CUDA device.
        ranks: The data-parallel ranks, which have different rows; for numbers, on the CPU.
        weights: Mesh of `WEIGHT_AXES`; None for one process.
        context: The processes that share this one's rows of tokens, where there are several.
        stages: The processes that hold the other layers for this one's rows, by stage, where there are several.
        everyone: All processes, on the CPU, for numbers and bytes.
    """

    dims: ParallelDims
    rank: int
    device: torch.device | None
    ranks: Ranks
    weights: DeviceMesh | None = None
    context: dist.ProcessGroup | None = None
    stages: dist.ProcessGroup | None = None
    everyone: dist.ProcessGroup | None = None

    @property
    def place(self) -> dict[str, int]:
        """Where this process stands on each axis, counted from 0."""
        return self.dims.place(self.rank)

    @property
    def fsdp(self) -> int:
        """Processes that weights, gradients and optimizer state are cut into."""
        return self.dims.dp_shard * self.dims.cp

    @property
    def tensor(self) -> DeviceMesh | None:
        """The mesh of the processes that share matrix products, where there are several."""
        return self.weights["tp"] if self.weights is not None and self.dims.tp > 1 else None

    @property
    def data(self) -> DeviceMesh | None:
        """The mesh that FSDP shards over, and replicates over where it has two axes, where there are several processes."""
        if self.weights is None or self.fsdp * self.dims.dp_replicate == 1:
            return None
        return self.weights["fsdp"] if self.dims.dp_replicate == 1 else self.weights["dp_replicate", "fsdp"]

    def leave(self) -> None:
        """Take leave of the others; the last call of a process that joined them."""
        if self.weights is not None and dist.is_initialized():
            dist.destroy_process_group()


SINGLE = Mesh(ParallelDims(), 0, None, ALONE)
"""One process that has all of the weights and of the batch."""


def join(config: ParallelConfig, device: str = "auto") -> Mesh:
    """Meet the other processes of this trainer, as torchrun's environment names them, and share out the work.

    Call it once per process, before anything else of `torch.distributed`, and `Mesh.leave` at the end. Without torchrun (no `WORLD_SIZE` in the environment) it is `SINGLE`.

    Args:
        config: The table `trainer.parallel`.
        device: auto, cpu or cuda. auto takes CUDA where there is one.

    Raises:
        ValueError: if the axes do not make up the number of processes, or this host has more processes than CUDA devices.
        torch.distributed.DistError: if the others do not come within `config.timeout_s`.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    dims = ParallelDims.of(config, world_size)
    if world_size == 1:
        return SINGLE
    own = _own_device(device)
    timeout = timedelta(seconds=config.timeout_s)
    if not dist.is_initialized():
        store = fresh_store(timeout)
        place = {} if store is None else {"rank": int(os.environ["RANK"]), "world_size": world_size}
        backend = "cuda:nccl,cpu:gloo" if own.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout, store=store, **place)
    return make_mesh(dims, own, timeout)


def make_mesh(dims: ParallelDims, device: torch.device, timeout: timedelta) -> Mesh:
    """Make the groups of a mesh in a job that has met; every process calls it alike.

    Args:
        dims: The axes; they make up all processes of the job.
        device: Where this process computes.
        timeout: How long a collective may wait.

    Raises:
        ValueError: if the axes do not make up the number of processes.
    """
    if dims.world_size != dist.get_world_size():
        raise ValueError(f"{dims} makes {dims.world_size} processes, but {dist.get_world_size()} have met")
    backend = "nccl" if device.type == "cuda" else "gloo"

    def group(axes: Iterable[str], of: str = backend) -> dist.ProcessGroup:
        own, _ = dist.new_subgroups_by_enumeration(_partition(dims, set(axes)), timeout=timeout, backend=of)
        return own

    groups = [group(axes) for axes in (["pp"], ["dp_replicate"], ["dp_shard", "cp"], ["tp"])]
    shape = (dims.pp, dims.dp_replicate, dims.dp_shard * dims.cp, dims.tp)
    layout = torch.arange(dims.world_size, dtype=torch.int).view(shape)
    return Mesh(
        dims=dims,
        rank=dist.get_rank(),
        device=device,
        ranks=Ranks(group(["dp_replicate", "dp_shard"], "gloo")) if dims.data_parallel > 1 else ALONE,
        weights=DeviceMesh.from_group(groups, device.type, layout, mesh_dim_names=WEIGHT_AXES),
        context=group(["cp"]) if dims.cp > 1 else None,
        stages=groups[0] if dims.pp > 1 else None,
        everyone=group(MESH_AXES, "gloo"),
    )


def _partition(dims: ParallelDims, axes: set[str]) -> list[list[int]]:
    """The ranks that differ on the given axes alone, in ascending order, for every place on the others."""

    def others(rank: int) -> tuple[int, ...]:
        return tuple(place for axis, place in sorted(dims.place(rank).items()) if axis not in axes)

    return [list(ranks) for _, ranks in groupby(sorted(range(dims.world_size), key=others), key=others)]


def _own_device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    # All processes of the host come to the same answer, so that none waits at the meeting for one that was refused.
    processes, devices = int(os.environ.get("LOCAL_WORLD_SIZE", local + 1)), torch.cuda.device_count()
    if processes > devices:
        raise ValueError(
            f"{processes} processes of this host have no CUDA device each ({devices} are visible): start"
            " one process per device (torchrun --nproc-per-node), or set device to cpu"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
