"""Which part of a model's weights a process keeps: the layers of its stage, its columns or rows of each matrix, its FSDP slice.

`cut_stage` (pipeline) comes first, then `split_matrices` (tensor parallel, Megatron's scheme, arXiv 1909.08053), then
`shard_weights` (FSDP2). Each changes the model in place. The weights may still be on the "meta" device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from sluice.models import ModelSizes
from trainer_svc.compute_config import COLUMNS, PARTIAL, check_tensor, stage_layers, tensor_plan
from trainer_svc.precision import VALUE_HEADS


def local_slice(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the part of a tensor that this process holds, and its offset in the whole tensor, per dimension."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.ndim
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.detach().to_local(), tuple(offsets)


def cpu_copy(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a contiguous CPU copy of a whole tensor; a floating-point tensor is converted to `dtype`, if it is given."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", target, copy=True).contiguous()


class Absent(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Stands in for a layer that another process has, so that the layers here keep their names."""

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: Any) -> torch.Tensor:  # noqa: ANN401  what the layer takes
        """Return the hidden states unchanged."""
        return hidden_states


def cut_stage(model: PreTrainedModel, stage: int, stages: int) -> None:
    """Remove the layers of other stages. The first stage keeps the embedding, the last one the norm and the heads.

    The last stage of a tied model keeps the embedding too, because its head uses that weight.
    Stages count from 0. The whole model is changed in place.

    Raises:
        ValueError: if the model does not consist of embedding, layers, norm and head.
    """
    body = model.base_model
    parts = ("embed_tokens", "layers", "norm")
    missing = [name for name in parts if not isinstance(getattr(body, name, None), nn.Module)]
    if missing:
        raise ValueError(
            f"{type(model).__name__} has no {missing[0]!r} and cannot be cut into stages: set trainer.parallel.pp to 1"
        )
    own = stage_layers(len(body.layers), stages)[stage]
    for index in range(len(body.layers)):
        if index not in own:
            body.layers[index] = Absent()
    if stage > 0 and not (stage == stages - 1 and _tied(model)):
        body.embed_tokens = None
    if stage < stages - 1:
        body.norm = nn.Identity()
        for name in ("lm_head", *VALUE_HEADS):
            if isinstance(getattr(model, name, None), nn.Module):
                setattr(model, name, None)


def tied_weight(model: PreTrainedModel, stage: int, stages: int) -> nn.Parameter | None:
    """Return the embedding of a tied model on the first and the last stage, which both hold a copy. None on other stages."""
    if stages == 1 or stage not in (0, stages - 1) or not _tied(model):
        return None
    return model.base_model.embed_tokens.weight


def _tied(model: PreTrainedModel) -> bool:
    return "lm_head.weight" in model.all_tied_weights_keys


def split_matrices(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Split a model's matrices over the processes of a group, in place. Every process passes the whole model.

    Queries, keys, values and the MLP's first matrices are split by columns (heads or inner width), and the matrices after them
    by rows, so that each block ends with a single sum over the group. Embedding and output layer are split by vocabulary. Norms
    and everything else stay whole in every process.

    Raises:
        ValueError: if transformers has no plan for the architecture, or its sizes are not divisible.
    """
    check_divides(model, mesh.size())
    body, head = model.base_model, model.get_output_embeddings()
    tied = head is not None and body.embed_tokens is not None and head.weight is body.embed_tokens.weight
    plan = tensor_plan(model.config.get_text_config().model_type)
    for layer in body.layers:
        if not isinstance(layer, Absent):
            _split(layer, mesh, _styles(plan))
    if body.embed_tokens is not None:
        _split(body, mesh, {"embed_tokens": RowwiseParallel(input_layouts=Replicate())})
    if tied:
        head.weight = body.embed_tokens.weight
    elif head is not None:
        _split(model, mesh, {"lm_head": ColwiseParallel()})


def _split(module: torch.nn.Module, mesh: DeviceMesh, plan: dict[str, ParallelStyle]) -> None:
    # Every process reads the same weights, so no process has to send them.
    parallelize_module(module, mesh, plan, src_data_rank=None)


def _styles(plan: dict[str, str]) -> dict[str, ParallelStyle]:
    """Translate transformers' plan of a layer into PyTorch's styles."""
    whole = Replicate()
    styles: dict[str, ParallelStyle] = {}
    for name, style in plan.items():
        block, _, _ = name.rpartition(".")
        # The common input of a block's first matrices becomes a DTensor once, so that its gradient is summed over the group once.
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
        ValueError: if the architecture has no plan, `tp` does not divide its sizes, or the model has an adapter.
    """
    check_tensor(ModelSizes.of(model.config.get_text_config().to_dict()), tp)
    wrapped = next((each for each in model.modules() if hasattr(each, "base_layer")), None)
    if wrapped is not None:
        raise ValueError(
            f"tensor parallelism splits plain linear layers, not {type(wrapped).__name__} of an adapter: set"
            " trainer.parallel.tp to 1 and use dp_shard or cp instead"
        )


def sum_partial_gradients(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Sum over processes the gradients of weights that each has whole but applies only to its own heads. Call it once per step."""
    plan = tensor_plan(model.config.get_text_config().model_type)
    ends = tuple(f"{name}.weight" for name, style in plan.items() if style == PARTIAL)
    partial = [each.grad for name, each in model.named_parameters() if name.endswith(ends) and each.grad is not None]
    if not partial:
        return
    gradients = [each.to_local() if isinstance(each, DTensor) else each for each in partial]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


class Root(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A module whose forward pass runs any function of the model, because FSDP gathers weights only around a module's forward pass.

    Args:
        every_time: Whether to sum gradients over processes after every micro-batch, instead of once per step.
    """

    def __init__(self, model: PreTrainedModel, *, every_time: bool = False) -> None:
        super().__init__()
        self.model = model
        self.every_time = every_time

    def forward(self, compute: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401
        """Call a function of the model with these arguments. Return its result: a tensor, or a tuple of tensors and None."""
        outputs = compute(*arguments)
        if isinstance(outputs, tuple):  # FSDP hooks outputs, so they must not be views that are changed in place
            return tuple(None if each is None else each.clone() for each in outputs)
        return outputs.clone()

    def prepare_backward(self, *, last: bool, keep_gathered: bool) -> None:
        """Set what FSDP does in the next backward pass.

        Args:
            last: Whether it is the last backward pass of its step, which sums gradients over processes.
            keep_gathered: Whether gathered weights stay in memory until the last backward pass.
        """
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(last or self.every_time)
            self.set_requires_all_reduce(last)
            self.set_is_last_backward(last)
            self.set_reshard_after_backward(last or not keep_gathered)

    def free_gathered(self) -> None:
        """Free the weights that stay gathered after forward passes without a backward pass."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def reset(self) -> None:
        """Drop FSDP's state of a pass that failed, so that another pass can follow."""
        if isinstance(self, FSDPModule):
            self.reset_iter_state()


def shard_weights(root: Root, mesh: DeviceMesh, *, dtype: torch.dtype, reshard: bool) -> None:
    """Shard a model in place: its decoder layers one by one, and the rest (embedding, norm, heads) together.

    A layer's weights are gathered before it runs and freed afterwards. Gradients are *summed* over the processes, not averaged.
    Master weights and reductions are float32. Weights are gathered in the precision of the forward pass, a value head in float32.
    Without `reshard` a layer's weights stay gathered after its forward pass. `mesh` has one axis to shard over, or two: one to
    replicate over and one to shard over. Split the model for tensor parallelism first.
    """
    narrow = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    names = set(root.model._no_split_modules or ())  # noqa: SLF001 - transformers' own list of what FSDP wraps
    for module in list(root.modules()):
        if type(module).__name__ in names:
            fully_shard(module, mesh=mesh, mp_policy=narrow, reshard_after_forward=reshard)
    for name in VALUE_HEADS:
        if isinstance(head := getattr(root.model, name, None), nn.Module):
            fully_shard(head, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    fully_shard(root, mesh=mesh, mp_policy=narrow)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            # Ranks without loss tokens must take part in every reduction.
            module.set_reduce_scatter_unused_params(True, recurse=False)
