"""Causal attention over sequences that lie packed in one row, for any transformers model.

transformers looks attention up by name and hands extra keyword arguments of the model call down to it. Under our name
it finds `packed_attention`, and the keyword `packed` carries the plan. Everything except attention works on the packed
row and sees no padding; attention gathers the sequences into blocks of similar length and runs the stock causal kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from trainer_svc.batch.attention_plan import AttentionPlan
from trainer_svc.engine.prefix_attention import fits, prefix_attention
from trainer_svc.engine.varlen_attention import varlen_attention
from trainer_svc.parallel.context import Context

__all__ = ["PACKED_ATTENTION", "packed_attention"]

PACKED_ATTENTION = "sluice_packed"
"""The name under which transformers finds the function."""

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""PyTorch's kernels that hold no matrix of scores: all but the math one."""

WINDOW_QUERIES = 256
"""Queries of a call with a sliding window: their mask has this many rows, and the window's length more columns."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # each batch has other blocks: layers are compiled around it
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: AttentionPlan,
    context: Context | None = None,
    varlen: bool = False,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,  # noqa: ANN401  transformers passes what some architecture needs
) -> tuple[torch.Tensor, None]:
    """Attend causally inside each packed sequence.

    Args:
        module: The attention layer that calls.
        query: Shape [1, heads, packed, head_dim].
        key: Shape [1, key-value heads, packed, head_dim].
        value: As `key`.
        attention_mask: Must be None: the plan says what attends to what.
        packed: The plan of the micro-batch.
        context: The processes that share the row; then each tensor holds this process's slice of the packed tokens.
        varlen: Whether to use the kernel for sequences of varying length.
        scaling: Factor on the scores; None means 1 / sqrt(head_dim).
        dropout: Probability of dropping a score; must be 0.
        sliding_window: Tokens that a query sees, itself included; None means all earlier ones.
        options: What else the architecture passes.

    Returns:
        The output of shape [1, packed, heads, head_dim], and None for the weights.

    Raises:
        ValueError: if the architecture needs a feature that this function lacks, or no fused kernel takes the tensors.
    """
    wanted = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if wanted or attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} needs {wanted or 'an attention mask'}, which packed training does not offer"
        )
    if dropout:
        raise ValueError(
            f"{type(module).__name__} drops attention scores (dropout {dropout:g}), which no memory-efficient kernel does on every"
            " device: set attention_dropout to 0 in the model's config.json"
        )
    slice_tokens = query.shape[2]
    if context is not None:
        query, key, value = context.gather_tokens((query, key, value), len(packed.sources))
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    if varlen and packed.varlen is not None:
        whole = varlen_attention(*rows, packed.varlen, scaling=scaling, sliding_window=sliding_window)
    elif packed.prefixes is not None and fits(query, key, value) and _sees_all(sliding_window, packed):
        whole = prefix_attention(*rows, packed.prefixes, scaling=scaling)
    else:
        whole = _block_attention(*rows, packed, scaling=scaling, sliding_window=sliding_window)
    if context is not None:
        whole = context.scatter_tokens(whole, slice_tokens)
    return whole.unsqueeze(0), None


def _block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: AttentionPlan,
    *,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """Attend in blocks of sequences of similar length with PyTorch's fused kernels; shapes [packed, heads, head_dim].

    The fused kernels never hold a matrix of tokens x tokens. Outside of a CPU they take as many key-value heads as query
    heads, and they take one head_dim for all three on a CPU: heads are repeated, and columns of zeros added, where needed.
    """
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    scale = head_dim**-0.5 if scaling is None else scaling
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.device.type != "cpu":
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    if head_dim != value_dim:
        width = max(head_dim, value_dim)
        query, key, value = (pad(each, (0, width - each.shape[-1])) for each in (query, key, value))
    outputs = []
    for block in packed.blocks:
        index = block.flatten()
        q, k, v = (
            tensor.index_select(0, index).unflatten(0, block.shape).transpose(1, 2) for tensor in (query, key, value)
        )
        output = _causal_attention(q, k, v, scale=scale, window=sliding_window)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, packed.sources)[..., :value_dim]


def _causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, window: int | None
) -> torch.Tensor:
    """Causal attention of whole sequences, shapes [sequences, heads, tokens, head_dim].

    With a sliding window the queries are cut into parts that see the keys of their window alone, so that the mask is small.
    """
    length = query.shape[2]
    if window is None or window >= length:
        return _fused(query, key, value, None, scale)
    parts = []
    for start in range(0, length, WINDOW_QUERIES):
        end = min(start + WINDOW_QUERIES, length)
        first = max(0, start - window + 1)
        places = torch.arange(first, end, device=query.device)
        distance = places[start - first :, None] - places[None, :]
        seen = (distance >= 0) & (distance < window)
        parts.append(_fused(query[:, :, start:end], key[:, :, first:end], value[:, :, first:end], seen, scale))
    return torch.cat(parts, 2)


def _fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """`scaled_dot_product_attention` by a fused kernel, causal without a mask.

    Raises:
        ValueError: if no fused kernel takes these tensors; the kernel that takes any holds all scores.
    """
    grouped = query.shape[1] != key.shape[1]
    try:
        with sdpa_kernel(FUSED):
            return scaled_dot_product_attention(
                query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
            )
    except RuntimeError as error:
        if "available kernel" not in str(error) and "viable backend" not in str(error):
            raise
        raise ValueError(
            f"no fused attention kernel takes {query.dtype} heads of {query.shape[-1]} on {query.device.type}, and the one that"
            " takes anything holds a score for each pair of tokens: set trainer.dtype to bfloat16, or choose another model"
        ) from error


def _sees_all(window: int | None, packed: AttentionPlan) -> bool:
    return window is None or window >= packed.longest


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
