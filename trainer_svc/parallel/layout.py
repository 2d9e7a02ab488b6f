"""A loaded network, laid out over the processes of a mesh."""

from __future__ import annotations

from dataclasses import replace

import torch

from trainer_svc.engine.network import Network
from trainer_svc.parallel.context import EXCHANGED_ATTENTION, Context, check_heads
from trainer_svc.parallel.fsdp import Root, shard_weights
from trainer_svc.parallel.mesh import Mesh
from trainer_svc.parallel.tensor import split_matrices

__all__ = ["spread"]


def spread(network: Network, mesh: Mesh, *, reshard: bool = True) -> Network:
    """Lay a network out over a mesh, in place; every process gives the same whole network.

    Args:
        network: On the CPU where there are several processes.
        mesh: The processes.
        reshard: Give a layer's gathered weights back after its forward pass.

    Raises:
        ValueError: if the model does not fit the mesh.
    """
    if mesh.weights is None or mesh.device is None:
        return network
    if mesh.dims.tp > 1 and network.language and not network.own_head:
        raise ValueError(
            f"{type(network.model).__name__} makes its logits in its own way, which tensor parallelism cannot cut: set"
            " trainer.parallel.tp to 1"
        )
    context = None
    if mesh.context is not None:
        check_heads(network.model.config.get_text_config().num_attention_heads, mesh.dims.tp, mesh.dims.cp)
        context = Context(mesh.context)
        network.model.set_attn_implementation(EXCHANGED_ATTENTION)
    if mesh.tensor is not None:
        split_matrices(network.model, mesh.tensor)
    root = Root(network.model)
    if mesh.data is not None:
        shard_weights(root, mesh.data, dtype=network.compute_dtype, reshard=reshard)
    else:
        root.to(mesh.device)
    return replace(network, device=torch.device(mesh.device), context=context, root=root)
