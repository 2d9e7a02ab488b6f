"""Causal attention over sequences that are packed in one row, for any transformers model.

transformers looks attention up by name and passes extra keyword arguments of the model call down to it. Under our name
it finds `packed_attention`, which takes the plan of the micro-batch from the keyword `packing`. Everything but attention
runs on the packed row without padding. Attention itself runs in one of three ways:

* blocks: gather sequences of similar length into padded blocks and run PyTorch's fused causal kernel (any device);
* prefixes: compute a beginning that samples share once (CPU);
* varlen: PyTorch's flash kernel for sequences of varying length, on the packed row as it is (CUDA, half precision).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from trainer_svc.batch.attention_plan import AttentionPlan, PrefixPlan, VarlenPlan
from trainer_svc.batch.shapes import Block, PackedHeads
from trainer_svc.parallel.context import Context

Attention = Literal["auto", "sdpa", "varlen"]

PACKED_ATTENTION = "sluice_packed"
"""The name under which transformers finds the function."""

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""PyTorch's kernels that never hold the scores of all pairs of tokens: all but the math one."""

WINDOW_QUERIES = 256
"""Queries of one call with a sliding window. Their mask has this many rows, and as many columns plus the window's length."""

VARLEN_TOLERANCE = 0.05
"""Largest accepted difference of varlen attention from stock attention, for values of size 1; bfloat16 has 8 bits."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How the row of a forward pass is packed, and how its attention is computed.

    Attributes:
        plan: Which packed tokens form which sequence.
        context: The processes that share the row; None if this process has all of it.
        varlen: Whether to use the kernel for sequences of varying length.
    """

    plan: AttentionPlan
    context: Context | None = None
    varlen: bool = False


@torch.compiler.disable  # type: ignore[untyped-decorator]  # each batch has other blocks: layers are compiled around it
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    **options: Any,  # noqa: ANN401  transformers passes what some architecture needs
) -> tuple[torch.Tensor, None]:
    """Attend causally inside each packed sequence.

    Args:
        module: The attention layer that calls.
        query: Shape [1, heads, packed, head_dim]; of shared rows this process's slice of the packed tokens.
        key: Shape [1, key-value heads, packed, head_dim].
        value: As `key`.
        attention_mask: Must be None: the plan says what attends to what.
        packing: How the row is packed.
        scaling: Factor on the scores; None means 1 / sqrt(head_dim).
        options: `sliding_window`, the number of tokens that a query sees (itself included; None: all earlier ones);
            `dropout`, which must be 0; and what else the architecture passes.

    Returns:
        The output of shape [1, packed, heads, head_dim], and None for the weights.

    Raises:
        ValueError: if the architecture needs a feature that this function lacks, or no fused kernel accepts the tensors.
    """
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None]
    if unsupported or attention_mask is not None:
        raise ValueError(
            f"{type(module).__name__} needs {unsupported or 'an attention mask'}, which packed training does not offer"
        )
    if dropout := options.get("dropout"):
        raise ValueError(
            f"{type(module).__name__} drops attention scores (dropout {dropout:g}), which no memory-efficient kernel does on every"
            " device: set attention_dropout to 0 in the model's config.json"
        )
    plan, context, window = packing.plan, packing.context, options.get("sliding_window")
    slice_tokens = query.shape[2]
    if context is not None:
        query, key, value = context.gather_tokens((query, key, value), len(plan.sources))
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    if packing.varlen and plan.varlen is not None:
        whole = _varlen_attention(*rows, plan.varlen, scaling=scaling, sliding_window=window)
    elif plan.prefixes is not None and _prefix_kernel_fits(*rows) and (window is None or window >= plan.longest):
        whole = _PrefixAttention.apply(*rows, plan.prefixes, scaling)
    else:
        whole = _block_attention(*rows, plan, scaling=scaling, sliding_window=window)
    if context is not None:
        whole = context.scatter_tokens(whole, slice_tokens)
    return whole.unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    *,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """Attend in blocks of sequences of similar length with PyTorch's fused kernels; shapes [packed, heads, head_dim].

    Elsewhere than on a CPU these kernels need as many key-value heads as query heads, so heads are repeated. They need one
    head_dim for all three tensors, so columns of zeros are added.
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
    for block in plan.blocks:
        index = block.flatten()
        q, k, v = (
            tensor.index_select(0, index).unflatten(0, block.shape).transpose(1, 2) for tensor in (query, key, value)
        )
        output = _causal_attention(q, k, v, scale=scale, window=sliding_window)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, plan.sources)[..., :value_dim]


def _causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, window: int | None
) -> torch.Tensor:
    """Attend causally inside whole sequences, shapes [sequences, heads, tokens, head_dim].

    With a sliding window the queries are cut into parts, each with the keys of its window only, so that the mask is small.
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
    """Run `scaled_dot_product_attention` with a fused kernel; causal if there is no mask.

    Raises:
        ValueError: if no fused kernel accepts these tensors. The math kernel would, but it holds all scores.
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
            f"no fused attention kernel accepts {query.dtype} heads of {query.shape[-1]} on {query.device.type}, and the math kernel"
            " would hold a score for each pair of tokens: set trainer.dtype to bfloat16, or choose another model"
        ) from error


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - only it returns the log-sum-exp
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001


def _prefix_kernel_fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    return bool(
        query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
    )


class _PrefixAttention(torch.autograd.Function):  # type: ignore[misc]  # torch is not typed here
    """Attention of samples that lie after their prompt, which computes the prompt once.

    Each token attends in two pieces: causally inside its own part (the prompt, or its sample), and to the whole prompt. Two
    softmaxes over disjoint keys join exactly: outputs are weighted by the exponentials of their log-sum-exps. In the backward
    pass each piece is differentiated with the joined output and log-sum-exp, as in ring attention (arXiv 2310.01889).
    Tensors have shapes [packed, heads, head_dim].
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any,  # noqa: ANN401 - autograd's context
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: PrefixPlan,
        scaling: float | None,
    ) -> torch.Tensor:
        outputs, sums = [], []
        for block in plan.blocks:
            q, k, v = (_rows(each, block) for each in (query, key, value))
            output, lse = _flash(q, k, v, 0.0, is_causal=True, scale=scaling)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
            sums.append(lse.transpose(1, 2).flatten(0, 1))
        output = torch.cat(outputs).index_select(0, plan.sources)
        lse = torch.cat(sums).index_select(0, plan.sources)
        for queries, keys in _stretches(plan):
            q, k, v = _heads(query[queries]), _heads(key[keys]), _heads(value[keys])
            crossed, crossed_lse = _flash(q, k, v, 0.0, is_causal=False, scale=scaling)
            _join(output[queries], lse[queries], crossed[0].transpose(0, 1), crossed_lse[0].transpose(0, 1))
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.plan, ctx.scaling = plan, scaling
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        query, key, value, output, lse = ctx.saved_tensors
        plan: PrefixPlan = ctx.plan
        parts: list[tuple[torch.Tensor, ...]] = []
        for block in plan.blocks:
            q, k, v, o, g = (_rows(each, block) for each in (query, key, value, output, grad))
            padding = (block < 0).unsqueeze(1)
            # A padded query has no weight on any key: its log-sum-exp is infinite, its gradient 0.
            sums = _rows(lse.unsqueeze(-1), block).squeeze(-1).masked_fill(padding, torch.inf)
            g = g.masked_fill(padding.unsqueeze(-1), 0.0)
            found = _flash_backward(g, q, k, v, o, sums, 0.0, is_causal=True, scale=ctx.scaling)
            parts.append(tuple(each.transpose(1, 2).flatten(0, 1) for each in found))
        unpacked = len(query) - len(output)
        grads = [
            torch.nn.functional.pad(torch.cat(each).index_select(0, plan.sources), (0, 0, 0, 0, 0, unpacked))
            for each in zip(*parts, strict=True)
        ]
        for queries, keys in _stretches(plan):
            q, o, g, sums = (_heads(each[queries]) for each in (query, output, grad, lse))
            k, v = _heads(key[keys]), _heads(value[keys])
            found = _flash_backward(g, q, k, v, o, sums, 0.0, is_causal=False, scale=ctx.scaling)
            for total, where, each in zip(grads, (queries, keys, keys), found, strict=True):
                total[where] += each[0].transpose(0, 1)
        return (*grads, None, None)


def _stretches(plan: PrefixPlan) -> Iterator[tuple[slice, slice]]:
    for keys, queries, end in plan.crossings:
        yield slice(queries, end), slice(keys, queries)


def _rows(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """Gather packed tokens: [packed, heads, width] to [rows, heads, columns, width]; padding repeats token 0."""
    return tensor.index_select(0, block.flatten().clamp(min=0)).unflatten(0, block.shape).transpose(1, 2)


def _heads(tensor: torch.Tensor) -> torch.Tensor:
    """Make a range of the packed row a batch of one: [tokens, heads, ...] to [1, heads, tokens, ...]."""
    return tensor.transpose(0, 1).unsqueeze(0)


def _join(output: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> None:
    """Join softmaxes over disjoint keys, in place; shapes [tokens, heads, width] and [tokens, heads]."""
    total = torch.logaddexp(lse, other_lse)
    output.mul_(torch.exp(lse - total).unsqueeze(-1).to(output.dtype))
    output.addcmul_(other, torch.exp(other_lse - total).unsqueeze(-1).to(output.dtype))
    lse.copy_(total)


def _varlen_attention(
    query: PackedHeads,
    key: PackedHeads,
    value: PackedHeads,
    plan: VarlenPlan,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
) -> PackedHeads:
    """Attend with the flash kernel for sequences of varying length; shapes [rows, heads, head_dim], CUDA and half precision only.

    Queries are the packed rows as they are: each sequence has its own tokens as queries, and the first sequence with a shared
    beginning has that too. Keys and values are gathered where sequences share a beginning. The kernel aligns the causal mask
    with the last key, so that a sequence's own tokens see all of the beginning. Rows after the packed tokens are left out.
    """
    precision = query.device.type
    dtype = torch.get_autocast_dtype(precision) if torch.is_autocast_enabled(precision) else value.dtype
    if plan.keys is None:
        key, value = key[: plan.tokens], value[: plan.tokens]
    else:
        key, value = (each.to(dtype).index_select(0, plan.keys) for each in (key, value))
    seen = -1 if sliding_window is None or sliding_window >= plan.longest_key else sliding_window - 1
    output: torch.Tensor = varlen_attn(
        query[: plan.tokens].to(dtype),
        key.to(dtype),
        value.to(dtype),
        plan.query_bounds,
        plan.key_bounds,
        plan.longest_query,
        plan.longest_key,
        scale=scaling,
        window_size=(seen, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output


def uses_varlen(setting: Attention, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> bool:
    """Return whether attention uses the kernel for sequences of varying length.

    Args:
        setting: `trainer.attention`; auto means the kernel wherever its results equal those of stock attention.
        device: Where the network computes.
        dtype: Precision of its forward pass.
        shape: Its numbers of heads and key-value heads, and head_dim.

    Raises:
        ValueError: if the setting is varlen and the kernel cannot be used.
    """
    if setting == "sdpa":
        return False
    obstacle = _obstacle(device, dtype, shape)
    if obstacle and setting == "varlen":
        raise ValueError(f"attention is varlen, but {obstacle}: set attention to auto or sdpa")
    return obstacle is None


def _obstacle(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> str | None:
    if device.type != "cuda":
        return "the kernel needs CUDA"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the kernel needs half precision and the forward pass is {str(dtype).removeprefix('torch.')}"
    try:
        gap = _varlen_gap(device, dtype, shape)
    except RuntimeError as error:  # an old device, or a head size without a kernel
        return f"the kernel does not run here ({error})"
    return None if gap <= VARLEN_TOLERANCE else f"its results differ from stock attention's by {gap:.2g}"


def _varlen_gap(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]) -> float:
    """Return the largest difference from stock attention, of values and gradients, for two sequences with a shared beginning."""
    heads, key_heads, head_dim = shape
    segments = [np.arange(5), np.r_[0, 1, 5, 6, 7]]
    plan = VarlenPlan.of(segments, 8)
    if plan is None:
        raise AssertionError("the two sequences lie in order")
    plan = plan.to(device)
    generator = torch.Generator(device).manual_seed(0)
    rows = [
        torch.randn(8, count, head_dim, generator=generator, device=device).to(dtype).requires_grad_()
        for count in (heads, key_heads, key_heads)
    ]
    expected = []
    for segment, own in zip(segments, (5, 3), strict=True):
        query, key, value = (each[segment].transpose(0, 1).unsqueeze(0) for each in rows)
        whole = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != key_heads)
        expected.append(whole[0].transpose(0, 1)[-own:])
    with torch.autocast(device.type, enabled=False):
        found = _varlen_attention(rows[0], rows[1], rows[2], plan)
    pairs = [(found, torch.cat(expected))]
    arriving = torch.randn(found.shape, generator=generator, device=device).to(dtype)
    pairs += zip(*(torch.autograd.grad(each, rows, arriving) for each in pairs[0]), strict=True)
    return max(float((ours.float() - stock.float()).abs().max()) for ours, stock in pairs)
