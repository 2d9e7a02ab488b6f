"""The check at load: are packed outputs of an architecture those of single sequences?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from trainer_svc.batch.attention_plan import AttentionPlan
from trainer_svc.engine.attention import PACKED_ATTENTION

__all__ = ["check_packing"]

PROBE_LENGTHS = (7, 4)
"""Tokens of the two sequences with which packing is checked at load; they share their first two."""

PROBE_TOLERANCE = 1e-3
"""Largest accepted difference of log-probabilities, in nats. float32 rounding stays below 1e-4; a missing feature is far above."""


@torch.no_grad()  # type: ignore[untyped-decorator]
def check_packing(model: PreTrainedModel, device: torch.device, *, language: bool) -> bool:
    """Compare packed outputs with the model's own on single sequences; from here on its attention is the packed one.

    Args:
        model: Computes in float32.
        device: Where it computes.
        language: Whether it has a language head; otherwise hidden states are compared.

    Returns:
        Whether the output embedding alone makes the logits.

    Raises:
        ValueError: if they differ.
    """
    body = model if language else model.base_model
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(vocabulary, (len(PROBE_LENGTHS), max(PROBE_LENGTHS)), generator=generator)
    rows[1, :2] = rows[0, :2]
    alone = _reading(body(rows.to(device)))  # what stands behind the second one's end changes nothing before it
    expected = torch.cat([row[1:length] for row, length in zip(alone, PROBE_LENGTHS, strict=True)])
    model.set_attn_implementation(PACKED_ATTENTION)
    arguments, keep = _packed(rows, device)
    trunk: list[torch.Tensor] = []
    watching = model.base_model.register_forward_hook(lambda _, __, output: trunk.append(output.last_hidden_state[0]))
    try:
        packed = _reading(body(**arguments))[0].index_select(0, keep)
    except TypeError as error:  # its forward does not hand keywords down
        raise ValueError(f"{type(model).__name__} cannot be trained packed ({error}): choose another model") from error
    finally:
        watching.remove()
    gap = float((packed - expected).abs().max())
    if not gap <= PROBE_TOLERANCE:
        raise ValueError(
            f"{type(model).__name__} gives other log-probabilities when sequences are packed (by {gap:.3g} nats): its layers "
            "mix tokens outside of softmax attention, which packed training does not support; choose another model"
        )
    head = model.get_output_embeddings()
    if not language or head is None or not trunk:
        return not language
    logits = head(trunk[0].index_select(0, keep))
    return bool((torch.log_softmax(logits.float(), -1) - packed).abs().max() <= PROBE_TOLERANCE)


def _packed(rows: torch.Tensor, device: torch.device) -> tuple[dict[str, Any], torch.Tensor]:
    """The two rows as one with their beginning once, as a model takes it, and the places of what follows each first token."""
    first, second = PROBE_LENGTHS
    plan = AttentionPlan.of([np.arange(first), np.r_[0, 1, first : first + second - 2]], first + second - 2).to(device)
    ids = torch.cat([rows[0], rows[1, 2:second]]).to(device).unsqueeze(0)
    positions = torch.cat([torch.arange(first), torch.arange(2, second)]).to(device).unsqueeze(0)
    keep = torch.tensor([*range(1, first), 1, *range(first, first + second - 2)], device=device)
    return {"input_ids": ids, "position_ids": positions, "packed": plan, "use_cache": False}, keep


def _reading(output: Any) -> torch.Tensor:  # noqa: ANN401  transformers' output classes
    """What packing must not change: log-probabilities, or hidden states where there are none."""
    logits = getattr(output, "logits", None)
    return output.last_hidden_state.float() if logits is None else torch.log_softmax(logits.float(), -1)
