"""What a network and its optimizers must not lose: as flat tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from trainer_svc.engine.optimizers import Optimizers

__all__ = ["state_room", "state_tensors"]

MODEL, OPTIMIZER = "model.", "optimizer."


def state_tensors(model: PreTrainedModel, optimizer: Optimizers) -> dict[str, torch.Tensor]:
    """The live tensors as ``model.<name>`` and ``optimizer.<moment>.<name>``; tied weights once."""
    named = _trained(model)
    weights = {f"{MODEL}{name}": tensor.detach() for name, tensor in (named | _buffers(model)).items()}
    return weights | {f"{OPTIMIZER}{name}": tensor for name, tensor in optimizer.tensors(named.items()).items()}


def state_room(
    model: PreTrainedModel, optimizer: Optimizers, shapes: Mapping[str, torch.Size], *, stage: bool = False
) -> dict[str, torch.Tensor]:
    """The live tensors that saved ones are to be read into; the optimizer's state is zeros until that has happened.

    Args:
        model: The model.
        optimizer: Its optimizers.
        shapes: Names and global shapes of what `state_tensors` gave.
        stage: Whether the model is one of several stages, and the names are those of all.

    Raises:
        ValueError: if names or shapes are not this model's and optimizer's; then nothing has changed.
    """
    named = _trained(model)
    tensors: dict[str, torch.Tensor] = named | _buffers(model)
    weights = _below(MODEL, shapes)
    moments = _below(OPTIMIZER, shapes)
    if stage:
        weights = {name: shape for name, shape in weights.items() if name in tensors}
        moments = {name: shape for name, shape in moments.items() if name.partition(".")[2] in named}
    if weights.keys() != tensors.keys():
        differing = sorted(weights.keys() ^ tensors.keys())
        raise ValueError(
            f"the checkpoint is of another model ({differing[0]!r} is on one side only): resume with the model it was made from"
        )
    for name, shape in weights.items():
        if shape != tensors[name].shape:
            raise ValueError(
                f"{name!r} has shape {tuple(shape)} in the checkpoint, {tuple(tensors[name].shape)} in the model"
            )
    room = optimizer.make_room(named, moments)
    return {f"{MODEL}{name}": tensor.detach() for name, tensor in tensors.items()} | {
        f"{OPTIMIZER}{name}": tensor for name, tensor in room.items()
    }


def _below(prefix: str, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def _trained(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Parameters that training changes; frozen ones are as the model's own files have them."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Buffers that belong to the model's files, where training changes all of the model."""
    if not all(parameter.requires_grad for parameter in model.parameters()):
        return {}
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}
