"""Fully sharded data parallelism (FSDP2): each process keeps a slice of the weights, gradients and optimizer state.

A layer's weights are gathered before it runs and freed after. Gradients are *summed* over the processes once per step:
between micro-batches each process adds up its own, unless `accumulate = sharded` lets it keep only its slice of them. The
norm of a gradient, and its clipping, hold for slices on any axes of the mesh.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trainer_svc.parallel.mesh import Mesh

__all__ = ["Root", "clip", "shard_weights", "total_norm"]

TINY = 1e-6
"""Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does."""


class Root(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A module whose forward pass runs any function of the model: FSDP gathers weights only around a module's forward pass.

    Args:
        model: The model.
        every_time: Sum gradients over processes after every backward pass, not once per step.
    """

    def __init__(self, model: PreTrainedModel, *, every_time: bool = False) -> None:
        super().__init__()
        self.model = model
        self.every_time = every_time

    def forward(self, compute: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
        """Return what a function of the model returns for these arguments: a tensor, or a tuple of tensors and None."""
        outputs = compute(*arguments)
        if isinstance(outputs, tuple):  # FSDP hooks the outputs, which must not be views that are changed in place
            return tuple(None if each is None else each.clone() for each in outputs)
        return outputs.clone()

    def reduce(self, *, now: bool, keep: bool) -> None:
        """Prepare the next backward pass.

        Args:
            now: Whether it is the last of its step, which sums gradients over processes.
            keep: Whether gathered weights stay until the last one.
        """
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(now or self.every_time)
            self.set_requires_all_reduce(now)
            self.set_is_last_backward(now)
            self.set_reshard_after_backward(now or not keep)

    def settle(self) -> None:
        """Free the weights that forward passes without a backward pass have left gathered."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def abandon(self) -> None:
        """Drop what a failed pass has left behind."""
        if isinstance(self, FSDPModule):
            self.reset_iter_state()


def shard_weights(root: Root, mesh: DeviceMesh, *, dtype: torch.dtype, reshard: bool) -> None:
    """Shard a model in place: its decoder layers one by one, and the rest (embedding, norm, heads) together.

    Master weights and reductions are float32. Layers are gathered in the precision of the forward pass. The rest stays
    float32, so that hidden states add up in float32 as they do in one process under autocast.

    Args:
        root: The model, on the CPU or the mesh's device, already split by tensor parallelism.
        mesh: One axis to shard over, or one to replicate over and one to shard over.
        dtype: Precision of the forward pass.
        reshard: Free a layer's gathered weights after its forward pass.
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
            # Ranks without loss tokens must take part in every reduction.
            module.set_reduce_scatter_unused_params(True, recurse=False)


def total_norm(
    gradients: Iterable[torch.Tensor], mesh: Mesh, *, refused: bool = False, in_two_stages: torch.Tensor | None = None
) -> tuple[float, bool]:
    """Return the 2-norm of the whole gradient; each element counts once, however many processes have it.

    Args:
        gradients: Plain tensors, equal on all processes of a pipeline stage, and DTensors on any axes of the mesh.
        mesh: The processes; all of them call this.
        refused: Whether this process has another reason to skip the step.
        in_two_stages: The gradient among them that another stage has too.

    Returns:
        The norm, and whether it is finite and no process refused: the same on every process.
    """
    by_copies: dict[int, list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        copies, local = _local(gradient, mesh)
        by_copies[copies * 2 if gradient is in_two_stages else copies].append(local)
    norms = {copies: torch.nn.utils.get_total_norm(parts, foreach=True) for copies, parts in by_copies.items()}
    sums = torch.zeros(2, dtype=torch.float64)
    sums[0] = sum(float(norm.double()) ** 2 / copies for copies, norm in norms.items())
    sums[1] = float(refused)
    if mesh.everyone is not None:
        dist.all_reduce(sums, group=mesh.everyone)
    norm, refusals = math.sqrt(sums[0]) if sums[0] >= 0 else math.nan, float(sums[1])
    return norm, math.isfinite(norm) and not refusals


def _local(gradient: torch.Tensor, mesh: Mesh) -> tuple[int, torch.Tensor]:
    """Return how many processes have this process's part of a gradient, and that part."""
    copies = mesh.dims.world_size // mesh.dims.pp
    if not isinstance(gradient, DTensor):
        return copies, gradient
    for axis, placement in enumerate(gradient.placements):
        if not placement.is_replicate():
            copies //= gradient.device_mesh.size(axis)
    return copies, gradient.to_local()


def clip(gradients: Iterable[torch.Tensor], norm: float, limit: float) -> None:
    """Scale a gradient down to the limit if its norm is above it."""
    factor = limit / (norm + TINY)
    if factor < 1.0:
        parts = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
        torch._foreach_mul_(parts, factor)
