"""Weights for others: by name for weight sync, as a directory for transformers and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from sluice.host_files import whole_directory

OWN_MODULES = ("value_head.",)
"""Modules that training adds to a language model. Files and engines do not have them."""


def live_tensors(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the live tensors by their Hugging Face names; of tied weights only the first name appears.

    Tensors that transformers fused at load (such as experts) are split again, which may copy them.

    Args:
        model: The model.
        weights: Its weights by their names in it.
    """
    once: dict[str, torch.Tensor] = {}
    seen: set[object] = set()
    parameters = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, tensor in _policy_state(weights).items():
        # A process may hold no element of a DTensor, and then no address shows which tensors are tied.
        place = (
            parameters.get(name, name)
            if isinstance(tensor, DTensor)
            else (tensor.data_ptr(), tensor.shape, tensor.stride())
        )
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        once[name] = tensor
    # Files and engines use the names before transformers fused modules.
    published: dict[str, torch.Tensor] = revert_weight_conversion(model, once)
    return published


def _policy_state(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if not name.startswith(OWN_MODULES)}


def cpu_copy(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a contiguous CPU copy of a whole tensor; floating-point tensors in `dtype`, if it is given."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", target, copy=True).contiguous()


def export_hf(
    model: PreTrainedModel, source: str, directory: Path, dtype: torch.dtype | None, weights: Mapping[str, torch.Tensor]
) -> None:
    """Write safetensors, config, generation config and tokenizer beside the target, then rename.

    Args:
        model: The model.
        source: Directory or hub id of the tokenizer.
        directory: Where to write.
        dtype: Precision of the weights; None keeps the model's.
        weights: The weights by their names in the model.

    Raises:
        FileExistsError: if the directory exists.
    """
    with whole_directory(directory) as staging:
        state = {name: cpu_copy(tensor, dtype) for name, tensor in _policy_state(weights).items()}
        model.save_pretrained(staging, state_dict=state)
        if dtype is not None:
            described = deepcopy(model.config)
            described.dtype = dtype  # transformers writes the model's dtype, to which engines would widen the weights
            described.save_pretrained(staging)
        AutoTokenizer.from_pretrained(source).save_pretrained(staging)
