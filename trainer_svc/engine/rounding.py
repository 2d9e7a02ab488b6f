"""Store and compute the weights of a model in the precisions that `trainer_svc.precision` names.

Autocast rounds the matrices of linear layers. `compute_as_served` rounds the other weights when they are read, so that one rank and
many ranks round alike, whatever FSDP gathered. Hidden states are added up in float32: the results are nearer to vLLM in bfloat16
than with bfloat16 sums (measured, docs/numerics.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from trainer_svc.precision import VALUE_HEADS, Kind, Precision, computed, stored

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""PyTorch's types by the names in the settings."""

_NAMES: dict[torch.dtype, Precision] = {dtype: name for name, dtype in DTYPES.items()}  # type: ignore[misc]


def store_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Store the weights that are not trained in the precision that `stored` gives, in place.

    Args:
        model: The whole model, before it is laid out over processes. Weights may still be on the "meta" device.
        dtype: Precision of matrices. bfloat16 changes no result of a bfloat16 forward pass, which rounds them to it anyway.
    """
    for _, _, kind, weight in _weights(model):
        if not weight.requires_grad:
            weight.data = weight.data.to(DTYPES[stored(kind, _NAMES[dtype])])


def _weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, Kind, nn.Parameter]]:
    """Yield each weight with its module, its name there and its kind. A tied weight comes once for each module that has it."""
    for path, module in model.named_modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if path.split(".")[-1] in VALUE_HEADS:
                yield module, name, "value head", weight
            else:
                yield module, name, "matrix" if weight.ndim > 1 else "vector", weight


def compute_as_served(model: PreTrainedModel, dtype: torch.dtype, *, whole_logits: bool) -> None:
    """Change the model so that its forward pass rounds each weight to the precision that `computed` gives.

    The caller runs the forward pass under autocast.

    Args:
        model: The model, laid out over processes.
        dtype: Precision of the forward pass; float32 changes nothing.
        whole_logits: Whether the model's own forward pass computes the logits. Then it computes them in float32.
    """
    if dtype == torch.float32:
        return
    head = model.get_output_embeddings() if whole_logits else None
    rounded: dict[nn.Module, list[str]] = {}
    for module, name, kind, _ in _weights(model):
        looked_up = type(module) is nn.Embedding  # some architectures scale what they look up
        if DTYPES[computed(kind, _NAMES[dtype])] == dtype and not (looked_up or isinstance(module, nn.Linear)):
            rounded.setdefault(module, []).append(name)
        if isinstance(module, nn.Embedding):  # rounding the rows that are looked up equals rounding the table
            module.register_forward_hook(lambda _, __, output: output.to(dtype).float())
    if model.config.get_text_config()._experts_implementation == "eager":  # noqa: SLF001 - it reads all experts once for each of them
        rounded = {module: names for module, names in rounded.items() if not _stacked(module)}
    for module, names in rounded.items():
        unread: Any = type(module)
        module.__class__ = _reading(unread, tuple(names), dtype)
    if head is not None and type(head) is nn.Linear:
        head.__class__ = _Float32Head
        head.rounding = dtype


@cache
def _reading(kind: Any, names: tuple[str, ...], dtype: torch.dtype) -> Any:  # noqa: ANN401 - classes of modules
    """Return a subclass of `kind` whose weights of these names are rounded when read. All layers share it: compiled code checks classes."""
    wide = issubclass(kind, nn.LayerNorm)  # on a CPU it takes only weights that have its input's precision
    read = {name: _rounded(name, dtype, torch.float32 if wide else dtype) for name in names}
    return type(f"Rounded{kind.__name__}", (kind,), read)


def _rounded(name: str, dtype: torch.dtype, held: torch.dtype) -> property:
    """Return a property that reads a weight of a module: the rounded weight, or FSDP's own slice while it is not gathered."""

    def read(module: nn.Module) -> torch.Tensor:
        weight = module._parameters[name]  # noqa: SLF001 - where torch keeps it
        return weight if isinstance(weight, DTensor) else weight.to(dtype).to(held)

    return property(read)


def _stacked(module: nn.Module) -> bool:
    return any(weight.ndim > 2 for weight in module.parameters(recurse=False))


class _Float32Head(nn.Linear):  # type: ignore[misc]  # torch is not typed here
    """An output layer that rounds its factors but not their product."""

    rounding: torch.dtype

    def forward(self, states: torch.Tensor) -> Any:  # noqa: ANN401 - a tensor
        """Compute the logits of hidden states."""
        with torch.autocast(states.device.type, enabled=False):
            weight, bias = (
                None if each is None else each.to(self.rounding).float() for each in (self.weight, self.bias)
            )
            return linear(states.to(self.rounding).float(), weight, bias)
