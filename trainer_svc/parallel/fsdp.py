"""Fully sharded data parallelism (FSDP2): each process keeps a slice of the weights, gradients and optimizer state.

Weights of a layer are gathered before it runs and given back after; gradients are *summed* over the processes, once
per step: between micro-batches each process adds up its own, unless it is to keep no more than its slice of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

__all__ = ["Root", "shard_weights"]


class Root(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A model with what is computed of it, as one module: FSDP gathers weights for the forward pass of modules alone.

    Args:
        model: The model.
        every_time: Sum gradients over processes after every backward pass, not once per step.
    """

    def __init__(self, model: PreTrainedModel, *, every_time: bool = False) -> None:
        super().__init__()
        self.model = model
        self.every_time = every_time

    def forward(self, compute: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
        """What a function makes of the arguments with the model: a tensor, or a tuple of tensors and None."""
        outputs = compute(*arguments)
        if isinstance(outputs, tuple):  # FSDP hooks the outputs, and would lose a view that is changed in place
            return tuple(None if each is None else each.clone() for each in outputs)
        return outputs.clone()

    def reduce(self, *, now: bool, keep: bool) -> None:
        """Say what the next backward pass is: the last of its step, which sums gradients over processes, or an earlier one.

        Args:
            now: Whether it is the last.
            keep: Whether gathered weights stay until the last.
        """
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(now or self.every_time)
            self.set_requires_all_reduce(now)
            self.set_is_last_backward(now)
            self.set_reshard_after_backward(now or not keep)

    def settle(self) -> None:
        """Give back the weights that passes without a backward pass have left gathered."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def abandon(self) -> None:
        """Drop what a pass that failed has left behind."""
        if isinstance(self, FSDPModule):
            self.reset_iter_state()


def shard_weights(root: Root, mesh: DeviceMesh, *, dtype: torch.dtype, reshard: bool) -> None:
    """Shard a model in place: its decoder layers one by one, and the rest (embedding, norm, heads) together.

    Masters and reductions are float32. In a lower precision the layers are gathered in it; the rest stays float32, so
    that hidden states add up in float32 as they do in one process under autocast.

    Args:
        root: The model, on the CPU or the mesh's device, cut by tensor parallelism already.
        mesh: One axis to shard over, or one to replicate over and one to shard over.
        dtype: Precision of the forward pass.
        reshard: Give a layer's gathered weights back after its forward pass.
    """
    layers = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    names = set(root.model._no_split_modules or ())  # noqa: SLF001 - transformers' own list of what FSDP wraps
    for module in list(root.modules()):
        if type(module).__name__ in names:
            fully_shard(module, mesh=mesh, mp_policy=layers, reshard_after_forward=reshard)
    fully_shard(root, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # Ranks without loss tokens take part in every reduction.
            module.set_reduce_scatter_unused_params(True, recurse=False)
