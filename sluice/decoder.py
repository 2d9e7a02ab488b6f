"""The sizes of a decoder with gated MLPs, such as Llama, Qwen3 and Qwen3-MoE. They serve to estimate its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from sluice.models import ModelSizes, config_on_disk

EXPERTS_ALIKE = frozenset({"mixtral", "olmoe", "qwen3_moe"})
"""Architectures in which every layer has experts, and no MLP besides them."""

OTHER_LAYERS = (
    "n_routed_experts",
    "moe_num_experts",
    "kv_lora_rank",
    "shared_expert_intermediate_size",
    "mlp_only_layers",
    "layer_group_size",
)
"""Settings that show that the layers of an architecture differ from those that `Decoder` counts."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """The sizes of a decoder.

    Attributes:
        inner: Columns of the MLP, or of one expert if there are experts.
        tied: Whether the output layer shares the embedding's weight.
        whole_logits: Whether the model scales or caps its logits; then all logits of a micro-batch are in memory at once.
        experts: Experts of each layer; 0 without any.
        chosen: Number of experts per token.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    whole_logits: bool = False
    experts: int = 0
    chosen: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """Return the sizes in a Hugging Face configuration; None if it does not describe a decoder of this kind.

        Models with experts are accepted if every layer has the same number of experts and no MLP besides them.
        """
        experts = ModelSizes.of(config).experts or 0
        if experts and config.get("model_type") not in EXPERTS_ALIKE:
            return None
        inner_name = "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
        names = ["num_hidden_layers", "hidden_size", inner_name, "num_attention_heads", "vocab_size"]
        sizes = [config.get(name) for name in [*names, *(["num_experts_per_tok"] if experts else [])]]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            return None
        if any(config.get(name) for name in OTHER_LAYERS) or config.get("decoder_sparse_step", 1) != 1:
            return None
        layers, hidden, inner, heads, vocabulary, *chosen = (int(size) for size in sizes if size is not None)
        return cls(
            layers=layers,
            hidden=hidden,
            inner=inner,
            heads=heads,
            key_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocabulary=vocabulary,
            tied=bool(config.get("tie_word_embeddings")),
            experts=int(experts),
            chosen=chosen[0] if chosen else 0,
            whole_logits=any(config.get(name) for name in ("logits_scaling", "logit_scale", "final_logit_softcapping")),
        )

    @property
    def queries(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads together."""
        return self.key_heads * self.head_dim

    @property
    def layer(self) -> int:
        """Parameters of a decoder layer, with all of its experts."""
        router = self.experts  # one row of hidden size for each
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.inner * max(1, self.experts) + router + 2)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding. An output layer of its own has the same number."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.layers * self.layer + self.embedding * (1 if self.tied else 2)

    def factors(self, rank: int) -> int:
        """Return the number of parameters of a decoder layer's LoRA factors. All linear layers have factors, experts have none."""
        widths = [(self.hidden, self.queries), (self.queries, self.hidden), *[(self.hidden, self.keys)] * 2]
        mlp = [] if self.experts else [(self.hidden, self.inner)] * 3
        return rank * sum(one + other for one, other in [*widths, *mlp])


def decoder_of(model: str) -> Decoder | None:
    """Return the sizes of a model in a directory; None for a hub id, or for a model of another kind.

    Raises:
        ConfigError: if its config.json cannot be read.
    """
    config = config_on_disk(model)
    return None if config is None else Decoder.of(config)
