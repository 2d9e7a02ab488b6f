"""The sizes of a dense decoder with gated MLPs, such as Llama and Qwen3, which its memory is estimated from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from sluice.models import EXPERTS, config_on_disk


@dataclass(frozen=True, slots=True)
class Decoder:
    """The sizes of a dense decoder.

    Attributes:
        tied: Whether the output layer shares the embedding's weight.
        whole_logits: Whether the model scales or caps its logits; then all logits of a micro-batch are in memory at once.
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

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self | None:
        """Return the sizes in a Hugging Face configuration; None if it does not describe a dense decoder of this kind."""
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        sizes = [config.get(name) for name in names]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            return None
        if any(config.get(name) for name in (*EXPERTS, "kv_lora_rank")):
            return None
        layers, hidden, inner, heads, vocabulary = (int(size) for size in sizes if size is not None)
        return cls(
            layers=layers,
            hidden=hidden,
            inner=inner,
            heads=heads,
            key_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocabulary=vocabulary,
            tied=bool(config.get("tie_word_embeddings")),
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
        """Parameters of a decoder layer."""
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.inner + 2)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and as many of an output layer of its own."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.layers * self.layer + self.embedding * (1 if self.tied else 2)

    def factors(self, rank: int) -> int:
        """Return the number of parameters of the LoRA factors of a decoder layer, beside all its linear layers."""
        widths = [(self.hidden, self.queries), (self.queries, self.hidden), *[(self.hidden, self.keys)] * 2]
        return rank * sum(one + other for one, other in [*widths, *[(self.hidden, self.inner)] * 3])


def decoder_of(model: str) -> Decoder | None:
    """Return the sizes of a model in a directory; None for a hub id, or for a model of another kind.

    Raises:
        ConfigError: if its config.json cannot be read.
    """
    config = config_on_disk(model)
    return None if config is None else Decoder.of(config)
