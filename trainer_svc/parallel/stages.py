"""Cutting a model into the stages of a pipeline: each process keeps some layers, under their own names."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trainer_svc.parallel.fits import layer_shares

__all__ = ["Absent", "cut_stage", "tied_weight"]


class Absent(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Stands where another stage has a layer, so that the layers here keep their names; hands hidden states on."""

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: Any) -> torch.Tensor:  # noqa: ANN401  what the layer takes
        """The hidden states as they came."""
        return hidden_states


def cut_stage(model: PreTrainedModel, stage: int, stages: int) -> None:
    """Leave only what one stage needs: its layers, the embedding on the first, norm and heads on the last.

    The last stage of a tied model has the embedding as well, which is its head's weight.

    Args:
        model: A whole model; changed in place.
        stage: Which one, from 0.
        stages: How many there are.

    Raises:
        ValueError: if the model is not built as embedding, layers, norm and head.
    """
    body = model.base_model
    parts = ("embed_tokens", "layers", "norm")
    missing = [name for name in parts if not isinstance(getattr(body, name, None), nn.Module)]
    if missing:
        raise ValueError(
            f"{type(model).__name__} has no {missing[0]!r} and cannot be cut into stages: set trainer.parallel.pp to 1"
        )
    own = layer_shares(len(body.layers), stages)[stage]
    for index in range(len(body.layers)):
        if index not in own:
            body.layers[index] = Absent()
    if stage > 0 and not (stage == stages - 1 and _tied(model)):
        body.embed_tokens = None
    if stage < stages - 1:
        body.norm = nn.Identity()
        for name in ("lm_head", "score", "value_head"):
            if isinstance(getattr(model, name, None), nn.Module):
                setattr(model, name, None)


def tied_weight(model: PreTrainedModel, stage: int, stages: int) -> nn.Parameter | None:
    """The embedding that the head of a tied model shares, on the two stages that hold a copy of it."""
    if stages == 1 or stage not in (0, stages - 1) or not _tied(model):
        return None
    return model.base_model.embed_tokens.weight


def _tied(model: PreTrainedModel) -> bool:
    return "lm_head.weight" in model.all_tied_weights_keys
