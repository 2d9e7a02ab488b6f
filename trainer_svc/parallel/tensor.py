"""Tensor parallelism: the processes of a group share each matrix product of a decoder (Megatron's scheme, arXiv 1909.08053).

Queries, keys, values and the MLP's first layers are cut by columns, that is by heads and by inner width; the layers
that follow them by rows, so that one sum over the group ends each block. Embedding and output layer are cut by
vocabulary. Norms and everything else are whole in every process.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from sluice.models import ModelSizes
from trainer_svc.parallel.fits import check_tensor
from trainer_svc.parallel.stages import Absent

__all__ = ["check_divides", "partial_parameters", "split_matrices", "sum_partial"]

PARTIAL = ("q_norm.weight", "k_norm.weight")
"""Ends of the names of weights that every process has whole but applies to its own heads alone."""


def split_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cut a model's matrices over a group, in place; each process gives the model with all of its weights.

    Args:
        model: A decoder with or without a language head; weights on the CPU or on the mesh's device.
        mesh: One axis.

    Raises:
        ValueError: if the architecture is not known, or its sizes do not divide.
    """
    check_divides(model, mesh.size())
    body, head = model.base_model, model.get_output_embeddings()
    tied = head is not None and body.embed_tokens is not None and head.weight is body.embed_tokens.weight
    for layer in body.layers:
        if not isinstance(layer, Absent):
            _cut(layer, mesh, _layer_plan())
    if body.embed_tokens is not None:
        _cut(body, mesh, {"embed_tokens": RowwiseParallel(input_layouts=Replicate())})
    if tied:
        head.weight = body.embed_tokens.weight
    elif head is not None:
        _cut(model, mesh, {"lm_head": ColwiseParallel()})


def _cut(module: torch.nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    # Every process has read the same weights, so that none has to send them.
    parallelize_module(module, mesh, plan, src_data_rank=None)


def _layer_plan() -> dict[str, ParallelStyle]:
    # The input of several layers is made a DTensor once, so that their gradients are summed over the group once.
    whole = Replicate()
    return {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }


def check_divides(model: PreTrainedModel, tp: int) -> None:
    """Refuse a model that the plan does not fit.

    Raises:
        ValueError: if the architecture is not known, or its sizes do not divide by `tp`.
    """
    check_tensor(ModelSizes.of(model.config.get_text_config().to_dict()), tp)
    wrapped = next((each for each in model.modules() if hasattr(each, "base_layer")), None)
    if wrapped is not None:
        raise ValueError(
            f"tensor parallelism cuts plain linear layers, not {type(wrapped).__name__} of an adapter: set"
            " trainer.parallel.tp to 1 and use dp_shard or cp instead"
        )


def partial_parameters(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Whole weights whose gradient in each process comes from its own heads alone."""
    return [parameter for name, parameter in model.named_parameters() if name.endswith(PARTIAL)]


def sum_partial(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Add up the gradients of `partial_parameters` over the group, in one exchange; call it once per step."""
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
