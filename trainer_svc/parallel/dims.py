"""The axes of parallelism: their sizes, the place of a rank, and whether a model fits them. Pure; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from sluice.config import ConfigError
from sluice.models import ModelSizes, sizes_on_disk
from trainer_svc.compute_config import ParallelConfig

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the device mesh. The last one changes fastest: neighbouring ranks, on one host, share the axis that communicates most."""

LAYER = "layers.*."
"""Prefix of the names of a decoder layer's modules in transformers' plans."""

COLUMNS, ROWS = "colwise", "rowwise"
"""transformers' names for splitting a matrix by its outputs or by its inputs."""

PARTIAL = "replicated_with_grad_allreduce"
"""transformers' name for a module that is whole in every process but applied to its own heads, so that gradients add up."""


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """The sizes of a mesh of processes.

    Attributes:
        dp_replicate: Copies of the sharded model.
        dp_shard: Processes that one copy's weights, gradients and optimizer state are sharded over (FSDP2).
        tp: Processes that share each matrix product.
        cp: Processes that share each packed row of tokens.
        pp: Pipeline stages that share the layers.
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
        """Return the mesh of a job; `dp_shard = -1` means all processes that the other axes leave.

        Raises:
            ValueError: if the product of the axes is not `world_size`.
        """
        fixed = config.dp_replicate * config.tp * config.cp * config.pp
        if config.dp_shard == -1:
            if world_size % fixed:
                raise ValueError(
                    f"{world_size} processes are not a multiple of dp_replicate x tp x cp x pp = {fixed}: change"
                    " trainer.parallel, or start a multiple of them (torchrun --nproc-per-node)"
                )
            dp_shard = world_size // fixed
        else:
            dp_shard = config.dp_shard
        dims = cls(config.dp_replicate, dp_shard, config.tp, config.cp, config.pp)
        if dims.world_size != world_size:
            raise ValueError(
                f"trainer.parallel ({dims}) makes {dims.world_size} processes, but there are {world_size}: start that many"
                " (torchrun --nproc-per-node), or set dp_shard to -1 for all that the other axes leave"
            )
        return dims

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return math.prod(getattr(self, name) for name in MESH_AXES)

    @property
    def data_parallel(self) -> int:
        """Number of processes with different rows, `dp_replicate` x `dp_shard`; the others have the rows of one of these."""
        return self.dp_replicate * self.dp_shard

    def place(self, rank: int) -> dict[str, int]:
        """Return the place of a rank on each axis, from 0; the last axis of `MESH_AXES` changes fastest."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} does not exist: there are {self.world_size} processes")
        place: dict[str, int] = {}
        for name in reversed(MESH_AXES):
            rank, place[name] = divmod(rank, getattr(self, name))
        return place

    def data_rank(self, rank: int) -> int:
        """Return the number of the rank's data-parallel group: ranks with the same number have the same rows."""
        place = self.place(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def ranks_of(self, data_rank: int) -> Iterable[int]:
        """Return the ranks with this `data_rank`, in ascending order."""
        return (rank for rank in range(self.world_size) if self.data_rank(rank) == data_rank)

    def __str__(self) -> str:
        """Return the axes with more than one process, such as ``dp_shard 4 x tp 2``; ``one process`` if there are none."""
        return (
            " x ".join(f"{name} {getattr(self, name)}" for name in MESH_AXES if getattr(self, name) > 1)
            or "one process"
        )


def check_sizes(model: str, setting: str, parallel: ParallelConfig) -> None:
    """Refuse a model on disk that the axes cannot split. Unknown sizes and hub ids are not checked.

    Raises:
        ConfigError: with the sizes that work.
    """
    sizes = sizes_on_disk(model, setting)
    if sizes is None:
        return
    try:
        if parallel.tp > 1 and sizes.model_type:
            check_tensor(sizes, parallel.tp)
        if parallel.cp > 1 and sizes.heads is not None:
            check_heads(sizes.heads, parallel.tp, parallel.cp)
        if parallel.pp > 1 and sizes.layers is not None:
            stage_layers(sizes.layers, parallel.pp)
    except ValueError as error:
        raise ConfigError(f"{setting} {model}: {error}") from error


def check_tensor(sizes: ModelSizes, tp: int) -> None:
    """Refuse a model that tensor parallelism cannot split.

    Raises:
        ValueError: if transformers has no usable plan for the architecture, or `tp` does not divide its sizes.
    """
    tensor_plan(sizes.model_type)
    named = {"attention heads": sizes.heads, "key-value heads": sizes.key_heads, "columns of the MLP": sizes.inner}
    for name, size in named.items():
        if size is not None and size % tp:
            raise ValueError(
                f"tp is {tp}, which does not divide the model's {size} {name}: set trainer.parallel.tp to a divisor of it"
            )


def tensor_plan(model_type: str) -> dict[str, str]:
    """Return transformers' own plan for the layers of an architecture: how each module is split, by its name in a layer.

    Raises:
        ValueError: if there is no plan, or a module is split in another way than by columns or rows.
    """
    from transformers import CONFIG_MAPPING  # noqa: PLC0415  takes seconds, and only tensor parallelism needs it

    whole = (CONFIG_MAPPING[model_type].base_model_tp_plan if model_type in CONFIG_MAPPING else None) or {}
    plan = {name.removeprefix(LAYER): style for name, style in whole.items() if name.startswith(LAYER)}
    remedy = "set trainer.parallel.tp to 1 and use dp_shard or cp instead"
    if not plan:
        raise ValueError(f"transformers has no tensor-parallel plan for {model_type} models: {remedy}")
    others = sorted(set(plan.values()) - {COLUMNS, ROWS, PARTIAL})
    if others:
        raise ValueError(
            f"the tensor-parallel plan of {model_type} models splits modules by {', '.join(others)}, but the trainer splits by"
            f" columns or rows only: {remedy}"
        )
    return plan


def check_heads(heads: int, tp: int, cp: int) -> None:
    """Raise ValueError if context parallelism (Ulysses) cannot split the heads of one tensor-parallel process."""
    if heads // tp % cp:
        fitting = [size for size in range(1, heads // tp + 1) if heads // tp % size == 0]
        raise ValueError(
            f"cp is {cp}, which does not divide the {heads // tp} attention heads of a process ({heads} over tp {tp}): set"
            f" trainer.parallel.cp to one of {', '.join(map(str, fitting))}"
        )


def stage_layers(layers: int, stages: int) -> list[range]:
    """Return the layers of each stage, in order. The first stages have one more if the layers do not divide evenly.

    The last stage never has one more, because it also has the head.

    Raises:
        ValueError: if there are fewer layers than stages.
    """
    if layers < stages:
        raise ValueError(
            f"{layers} layers cannot be divided into {stages} stages: set trainer.parallel.pp to {layers} or less"
        )
    least, more = divmod(layers, stages)
    ends = [(stage + 1) * least + min(stage + 1, more) for stage in range(stages)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
