"""Lay a loaded network out over the processes of a mesh, and choose what runs micro-batches through it."""

from __future__ import annotations

from dataclasses import replace

import torch

from trainer_svc.compute_config import ParallelConfig
from trainer_svc.engine.network import Network
from trainer_svc.engine.runner import OneByOne, Pipelined, Runner
from trainer_svc.engine.weight_files import read_weights
from trainer_svc.parallel.context import Context
from trainer_svc.parallel.dims import check_heads
from trainer_svc.parallel.fsdp import Root, shard_weights
from trainer_svc.parallel.mesh import Mesh
from trainer_svc.parallel.pipeline import Stage, cut_stage, tied_weight
from trainer_svc.parallel.tensor import split_matrices

__all__ = ["runner_of", "shared_by_stages", "spread"]


def spread(network: Network, mesh: Mesh, config: ParallelConfig | None = None) -> Network:
    """Lay a network out over a mesh, in place. Every process gives the same whole network.

    Args:
        network: On the CPU; or with its weights still in their files, of which this process then reads only what it keeps.
        mesh: The processes; `SINGLE` changes nothing.
        config: What FSDP keeps, and when it sums gradients; None: the defaults.

    Raises:
        ValueError: if the model does not fit the mesh.
    """
    if mesh.weights is None or mesh.device is None:
        return network
    if network.language and not network.own_head and mesh.dims.tp * mesh.dims.pp > 1:
        raise ValueError(
            f"{type(network.model).__name__} does more than multiply by its output embedding to make logits, which tensor and"
            " pipeline parallelism cannot split: set trainer.parallel.tp and trainer.parallel.pp to 1"
        )
    if mesh.stages is not None:
        cut_stage(network.model, mesh.place["pp"], mesh.dims.pp)
        last = mesh.place["pp"] == mesh.dims.pp - 1
        network = replace(network, value_head=network.value_head if last else None)
    context = None
    if mesh.context is not None:
        check_heads(network.model.config.get_text_config().num_attention_heads, mesh.dims.tp, mesh.dims.cp)
        context = Context(mesh.context)
    if mesh.tensor is not None:
        split_matrices(network.model, mesh.tensor)
    config = config or ParallelConfig()
    root = Root(network.model, every_time=config.accumulate == "sharded")
    if mesh.data is not None:
        shard_weights(root, mesh.data, dtype=network.compute_dtype, reshard=config.reshard)
    if network.files is not None:
        read_weights(network.model, network.files, mesh.device)
    root.to(mesh.device)  # also tells FSDP which weights have been read meanwhile
    return replace(network, device=torch.device(mesh.device), context=context, root=root, files=None)


def runner_of(network: Network, mesh: Mesh, *, reshard: bool = True) -> Runner:
    """Return what runs micro-batches through a network that `spread` gave.

    Args:
        network: This process's part.
        mesh: The processes.
        reshard: Whether weights that were gathered for a micro-batch are given back before the next.
    """
    if mesh.stages is None:
        return OneByOne(network, reshard=reshard)
    wide = any(parameter.dtype == torch.float64 for parameter in network.model.parameters())
    stage = Stage(mesh.stages, network.width, network.device, wide=wide)
    return Pipelined(network, stage, shared_by_stages(network, mesh), reshard=reshard)


def shared_by_stages(network: Network, mesh: Mesh) -> torch.nn.Parameter | None:
    """Return this process's copy of a weight that the first and the last stage both have, if there is one here."""
    return None if mesh.stages is None else tied_weight(network.model, mesh.place["pp"], mesh.dims.pp)
