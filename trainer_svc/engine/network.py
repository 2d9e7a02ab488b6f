"""The forward pass: a causal transformer that computes its outputs at the loss tokens of packed micro-batches.

Except for attention, transformers' own code runs on the packed row without padding. transformers looks attention up by name and
passes extra keyword arguments of the model call down to it. Under the name `PACKED_ATTENTION` it finds `packed_attention`, which
takes the plan of the micro-batch from the keyword `packing` and attends causally inside each sequence, in one of three ways:

* blocks: gather sequences of similar length into padded blocks and run PyTorch's fused causal kernel (any device);
* prefixes: compute a shared beginning once for all samples that have it (CPU);
* varlen: PyTorch's flash kernel for sequences of varying length, on the packed row as it is (CUDA, half precision).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from trainer_svc.batch.attention_plan import AttentionPlan, VarlenPlan
from trainer_svc.batch.rows import MicroBatch, Outputs
from trainer_svc.batch.shapes import PackedHeads, PerToken, Scalar
from trainer_svc.engine.cpu_kernels import prefix_attention, prefix_kernel_fits, rounded
from trainer_svc.engine.logprob import Entropy, logprobs_of_logits, logprobs_of_states
from trainer_svc.engine.weight_files import WeightFiles
from trainer_svc.parallel.context import Context
from trainer_svc.parallel.sharding import Root

OWN_MODULES = ("value_head.",)
"""Modules that training adds to a language model. Files and engines do not have them."""

Head = Literal["language", "value", "both"]
"""What a network has on top: logits of tokens, one value per token, or both on one trunk."""

PACKED_ATTENTION = "sluice_packed"
"""The name under which transformers finds the function."""

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
"""PyTorch's kernels that never hold the scores of all pairs of tokens: all except the math kernel."""

NAMES_GROUPS = "enable_gqa" in signature(varlen_attn).parameters
"""Whether PyTorch's varlen function needs an argument for fewer key-value heads than query heads: it does from PyTorch 2.13 on."""

WINDOW_QUERIES = 256
"""Queries of one call with a sliding window. The mask of a call has up to WINDOW_QUERIES rows and WINDOW_QUERIES + window columns."""


class HeadShape(NamedTuple):
    """The heads of an attention layer.

    Attributes:
        queries: Number of query heads.
        keys: Number of key-value heads.
        size: Columns of a head of queries and keys.
        value_size: Columns of a head of values.
    """

    queries: int
    keys: int
    size: int
    value_size: int

    def __str__(self) -> str:
        """Return for example ``32 / 8 heads of 128``, or ``16 / 16 heads of 192 (values: 128)``."""
        values = "" if self.size == self.value_size else f" (values: {self.value_size})"
        return f"{self.queries} / {self.keys} heads of {self.size}{values}"


@dataclass(frozen=True, slots=True)
class Network:
    """A causal transformer that computes its outputs at the loss tokens of packed micro-batches.

    Attributes:
        model: The transformers model with float32 weights; a value head is one of its modules.
        logit_cells: Most logits (tokens x vocabulary) in memory at once.
        own_head: Whether the logits are the output embedding times the last hidden state and nothing else. Otherwise the
            model's own forward computes all logits at once.
        value_head: The linear layer that turns a hidden state into a value; None if this process has none.
        context: The processes that share each row of tokens; None if each has its rows alone.
        root: Gathers sharded weights around the forward pass; None in a single process.
        varlen: Whether attention uses the kernel for sequences of varying length.
        files: The files of weights that are still on the "meta" device; None once they are read.
        longest_row: Most tokens of a sequence (see `trainer_svc.engine.loading.fix_frequencies`); None means any number.
        few_lengths: Whether rows are padded so that few lengths occur, for `trainer_svc.engine.cpu_kernels`.
        head_shapes: The heads of the attention layers that this process ran in the packing check.
    """

    model: PreTrainedModel
    device: torch.device
    compute_dtype: torch.dtype
    logit_cells: int
    own_head: bool = True
    value_head: torch.nn.Linear | None = None
    head: Head = "language"
    context: Context | None = None
    root: Root | None = None
    varlen: bool = False
    files: WeightFiles | None = None
    longest_row: int | None = None
    few_lengths: bool = False
    head_shapes: frozenset[HeadShape] = frozenset()

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model knows."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def width(self) -> int:
        """Size of a hidden state."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def language(self) -> bool:
        """Whether the network predicts tokens."""
        return self.head != "value"

    @property
    def has_values(self) -> bool:
        """Whether the network computes values."""
        return self.head != "language"

    def local_tokens(self, batch: MicroBatch) -> int:
        """Return the number of tokens of a micro-batch whose hidden states this process computes."""
        return batch.packed_tokens if self.context is None else self.context.width(batch)

    def outputs(self, batch: MicroBatch, *, entropy: Entropy = "none") -> Outputs:
        """Compute the outputs at each loss token under the current weights, for a micro-batch on the network's device."""
        return Outputs(*self.under_root(self._outputs, batch, entropy))

    def under_root(self, compute: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401  what `compute` returns
        """Call a function that runs modules of the model, with sharded weights gathered around it; see `Root`."""
        return compute(*arguments) if self.root is None else self.root(compute, *arguments)

    @contextmanager
    def reset_on_error(self) -> Iterator[None]:
        """Reset the sharding's state if a pass fails, so that another pass can follow."""
        try:
            yield
        except BaseException:
            if self.root is not None:
                self.root.reset()
            raise

    def _outputs(self, batch: MicroBatch, entropy: Entropy) -> tuple[PerToken | None, ...]:
        if self.own_head:
            return self.read(self.hidden(batch), batch, entropy=entropy)
        part, own = self._own_slice(batch)
        with self._precision():
            logits = self._forward(self.model, part, input_ids=part.input_ids, logits_to_keep=part.predictors).logits[0]
            columns = logprobs_of_logits(logits, part.targets, part.temperatures, entropy=entropy)
        return self._gather(columns, own, batch)

    def hidden(self, batch: MicroBatch, states: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the hidden states after the last layer, shape [packed, width]; only for this process's slice if a row is shared.

        Rows of padding may follow. They attend to nothing, and no token attends to them.

        `states` is the input of this process's first layer; None: compute it by embedding the tokens.
        """
        batch, _ = self._own_slice(batch)
        with self._precision():
            inputs = {"input_ids": batch.input_ids} if states is None else {"inputs_embeds": states.unsqueeze(0)}
            hidden: torch.Tensor = self._forward(self.model.base_model, batch, **inputs).last_hidden_state[0]
            return hidden

    def read(self, hidden: torch.Tensor, batch: MicroBatch, *, entropy: Entropy) -> tuple[PerToken | None, ...]:
        """Compute log-probabilities, entropies and values at each loss token from the hidden states after the last layer."""
        part, own = self._own_slice(batch)
        with self._precision():
            states = hidden.index_select(0, part.predictors)
            values = None if self.value_head is None else _values(self.value_head, states)
            columns: tuple[PerToken | None, PerToken | None] = (None, None)
            if self.language:
                columns = logprobs_of_states(
                    self.model.get_output_embeddings(),
                    states,
                    part.targets,
                    part.temperatures,
                    vocabulary=self.vocabulary,
                    entropy=entropy,
                    cells=self.logit_cells,
                )
        return self._gather((*columns, values), own, batch)

    def _own_slice(self, batch: MicroBatch) -> tuple[MicroBatch, torch.Tensor | None]:
        return (batch, None) if self.context is None else self.context.own_slice(batch)

    def _gather(
        self, columns: tuple[PerToken | None, ...], own: torch.Tensor | None, batch: MicroBatch
    ) -> tuple[PerToken | None, ...]:
        if self.context is None or own is None:
            return columns
        return tuple(self.context.gather(columns, own, len(batch.targets)))

    def _precision(self) -> torch.autocast:
        mixed = self.compute_dtype != torch.float32
        # Each layer reads its weights once. Autocast's cache would keep the copies of all layers until the end of the pass.
        return torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=mixed, cache_enabled=False)

    def _forward(self, module: torch.nn.Module, batch: MicroBatch, **options: Any) -> Any:  # noqa: ANN401  transformers' output classes
        packing = Packing(batch.attention, self.context, varlen=self.varlen)
        positions = batch.position_ids
        if self.few_lengths:
            padding = (0, rounded(batch.packed_tokens) - batch.packed_tokens)
            options["input_ids"], positions = pad(options["input_ids"], padding), pad(positions, padding)
        return module(position_ids=positions, packing=packing, use_cache=False, **options)


def _values(head: torch.nn.Module, states: torch.Tensor) -> PerToken:
    # float32 or wider, also if the layers compute in bfloat16: returns need more digits than bfloat16 has.
    with torch.autocast(states.device.type, enabled=False):
        return head(states if states.dtype == torch.float64 else states.float()).squeeze(-1)


def connected(loss: Scalar, outputs: Outputs) -> Scalar:
    """Return the loss of an empty micro-batch, connected to all outputs: ranks exchange gradients in its backward pass."""
    columns = (outputs.logprobs, outputs.entropy, outputs.values)
    return loss + sum(column.sum() for column in columns if column is not None and column.requires_grad)


@dataclass(frozen=True, slots=True)
class Packing:
    """How the row of a forward pass is packed, and how its attention is computed.

    Attributes:
        context: The processes that share the row; None if this process has all of it.
        varlen: Whether to use the kernel for sequences of varying length.
        seen: Set to which each attention layer adds its `HeadShape`; None: they are not collected.
    """

    plan: AttentionPlan
    context: Context | None = None
    varlen: bool = False
    seen: set[HeadShape] | None = None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # blocks differ per batch, so layers are compiled around this
def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    **options: Any,  # noqa: ANN401  transformers passes options that only some architectures need
) -> tuple[torch.Tensor, None]:
    """Attend causally inside each packed sequence.

    Args:
        module: The attention layer that calls.
        query: Shape [1, heads, packed, head_dim]; if rows are shared, this process's slice of the packed tokens.
        key: Shape [1, key-value heads, packed, head_dim].
        value: Shape [1, key-value heads, packed, value_dim]. Kernels need one size for all heads, so columns of zeros are added
            if value_dim is not head_dim.
        attention_mask: Must be None: the plan says which token attends to which.
        packing: How the row is packed.
        scaling: Factor on the scores; None means 1 / sqrt(head_dim).
        options: `sliding_window`, the number of tokens that a query sees (itself included; None: all earlier ones);
            `dropout`, which must be 0; and other options of the architecture.

    Returns:
        The output of shape [1, packed, heads, value_dim], and None for the weights.

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
    slice_tokens, head_dim, value_dim = query.shape[2], query.shape[3], value.shape[3]
    if packing.seen is not None:
        packing.seen.add(HeadShape(query.shape[1], key.shape[1], head_dim, value_dim))
    scale = head_dim**-0.5 if scaling is None else scaling
    if head_dim != value_dim:
        width = max(head_dim, value_dim)
        query, key, value = (pad(each, (0, width - each.shape[-1])) for each in (query, key, value))
    if context is not None:
        query, key, value = context.gather_tokens((query, key, value), len(plan.sources))
    rows = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    if packing.varlen and plan.varlen is not None:
        whole = varlen_attention(*rows, plan.varlen, scale=scale, sliding_window=window)
    elif plan.prefixes is not None and prefix_kernel_fits(*rows) and (window is None or window >= plan.longest):
        whole = prefix_attention(*rows, plan.prefixes, scale)
    else:
        whole = _block_attention(*rows, plan, scale=scale, sliding_window=window)
    whole = whole[..., :value_dim]
    if context is not None:
        whole = context.scatter_tokens(whole, slice_tokens)
    elif len(whole) < slice_tokens:
        whole = pad(whole, (0, 0, 0, 0, 0, slice_tokens - len(whole)))
    return whole.unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _block_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """Attend in blocks of sequences of similar length with PyTorch's fused kernels; shapes [packed, heads, head_dim].

    Except on a CPU, these kernels need the same number of key-value heads and query heads, so key-value heads are repeated.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.device.type != "cpu":
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    outputs = []
    for block in plan.blocks:
        index = block.flatten()
        q, k, v = (
            tensor.index_select(0, index).unflatten(0, block.shape).transpose(1, 2) for tensor in (query, key, value)
        )
        output = _causal_attention(q, k, v, scale=scale, window=sliding_window)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, plan.sources)


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
    """Run `scaled_dot_product_attention` with a fused kernel; the math kernel would hold all scores. Without a mask it is causal."""
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


def varlen_attention(
    query: PackedHeads,
    key: PackedHeads,
    value: PackedHeads,
    plan: VarlenPlan,
    *,
    scale: float,
    sliding_window: int | None,
) -> PackedHeads:
    """Attend with the flash kernel for sequences of varying length; shapes [rows, heads, head_dim], CUDA and half precision only.

    Queries are the packed rows as they are. A sequence's own tokens are its queries; the tokens of a shared beginning are queries
    of the first sequence that has it. Keys and values are gathered if sequences share a beginning. The kernel aligns the causal
    mask with the last key, so that a sequence's own tokens see the whole beginning. Rows after the packed tokens are left out.
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
        scale=scale,
        window_size=(seen, 0),
        **_grouping(query, key),
    )
    return output


def _grouping(query: PackedHeads, key: PackedHeads) -> dict[str, bool]:
    """Return the argument for fewer key-value heads than query heads, if this release of PyTorch needs one."""
    return {"enable_gqa": query.shape[1] != key.shape[1]} if NAMES_GROUPS else {}
