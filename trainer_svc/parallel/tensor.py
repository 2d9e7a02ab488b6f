"""Tensor parallelism: the processes of a group share each matrix product of a decoder (Megatron's scheme, arXiv 1909.08053).

The layers follow transformers' own plan: queries, keys, values and the MLP's first matrices are split by columns, that is by
heads and by inner width; the matrices that follow them by rows, so that one sum over the group ends each block. Embedding and
output layer are split by vocabulary. Every process has norms and everything else whole.
"""

from __future__ import annotations

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
from trainer_svc.parallel.dims import COLUMNS, PARTIAL, check_tensor, tensor_plan
from trainer_svc.parallel.pipeline import Absent

__all__ = ["check_divides", "split_matrices", "sum_partial_gradients"]


def split_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split a model's matrices over a group, in place. Every process gives the model with all of its weights.

    Args:
        model: A decoder with or without a language head; weights on the CPU or on the mesh's device.
        mesh: One axis.

    Raises:
        ValueError: if the architecture has no plan, or its sizes do not divide.
    """
    check_divides(model, mesh.size())
    body, head = model.base_model, model.get_output_embeddings()
    tied = head is not None and body.embed_tokens is not None and head.weight is body.embed_tokens.weight
    plan = _plan(model)
    for layer in body.layers:
        if not isinstance(layer, Absent):
            _split(layer, mesh, _styles(plan))
    if body.embed_tokens is not None:
        _split(body, mesh, {"embed_tokens": RowwiseParallel(input_layouts=Replicate())})
    if tied:
        head.weight = body.embed_tokens.weight
    elif head is not None:
        _split(model, mesh, {"lm_head": ColwiseParallel()})


def _plan(model: PreTrainedModel) -> dict[str, str]:
    return tensor_plan(model.config.get_text_config().model_type)


def _split(module: torch.nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    # Every process has read the same weights, so none has to send them.
    parallelize_module(module, mesh, plan, src_data_rank=None)


def _styles(plan: dict[str, str]) -> dict[str, ParallelStyle]:
    """Return transformers' plan of a layer as PyTorch's styles."""
    whole = Replicate()
    styles: dict[str, ParallelStyle] = {}
    for name, style in plan.items():
        block, _, _ = name.rpartition(".")
        # The input of a block's first matrices becomes a DTensor once, so that their gradients are summed over the group once.
        if style == COLUMNS and block.endswith("attn"):
            styles[block] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
            )
        elif style == COLUMNS:
            styles[block] = PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,))
        if style != PARTIAL:
            styles[name] = ColwiseParallel() if style == COLUMNS else RowwiseParallel()
    return styles


def check_divides(model: PreTrainedModel, tp: int) -> None:
    """Refuse a model that tensor parallelism cannot split.

    Raises:
        ValueError: if the architecture has no plan, its sizes do not divide by `tp`, or it has layers of an adapter.
    """
    check_tensor(ModelSizes.of(model.config.get_text_config().to_dict()), tp)
    wrapped = next((each for each in model.modules() if hasattr(each, "base_layer")), None)
    if wrapped is not None:
        raise ValueError(
            f"tensor parallelism splits plain linear layers, not {type(wrapped).__name__} of an adapter: set"
            " trainer.parallel.tp to 1 and use dp_shard or cp instead"
        )


def sum_partial_gradients(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Add up the gradients of weights that every process has whole but applies to its own heads; call it once per step."""
    ends = tuple(f"{name}.weight" for name, style in _plan(model).items() if style == PARTIAL)
    partial = [each.grad for name, each in model.named_parameters() if name.endswith(ends) and each.grad is not None]
    if not partial:
        return
    gradients = [each.to_local() if isinstance(each, DTensor) else each for each in partial]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
