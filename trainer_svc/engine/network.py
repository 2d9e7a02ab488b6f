"""The network: a causal transformer's outputs at packed loss tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PreTrainedModel

from trainer_svc.batch.rows import MicroBatch, Outputs
from trainer_svc.batch.shapes import PerToken
from trainer_svc.engine.fused_logprob import Entropy
from trainer_svc.engine.output_layer import logprobs_of_logits, logprobs_of_states

if TYPE_CHECKING:
    from trainer_svc.engine.weight_files import WeightFiles
    from trainer_svc.parallel.context import Context
    from trainer_svc.parallel.fsdp import Root

__all__ = ["DTYPES", "Entropy", "Head", "Network", "resolve_device"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""PyTorch's types by our names."""

Head = Literal["language", "value", "both"]
"""What a network has on top: logits of tokens, one value per token, or both on one trunk."""


def resolve_device(name: str) -> torch.device:
    """The device that a config names.

    Raises:
        ValueError: if it names CUDA and there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but PyTorch finds no CUDA device: set device to auto or cpu")
    return torch.device(name)


@dataclass(frozen=True, slots=True)
class Network:
    """A causal transformer that computes its outputs at the loss tokens of packed micro-batches.

    Attributes:
        model: The transformers model with float32 weights; a value head is one of its modules.
        device: Where it lies.
        compute_dtype: Precision of the forward pass.
        logit_cells: Most logits (tokens x vocabulary) alive at once.
        own_head: Whether logits are the output embedding of the last hidden state and nothing else; otherwise the
            model's own forward makes them, all at once.
        value_head: The linear layer that turns a hidden state into a value, where it is here.
        head: What the whole network has on top.
        context: The processes that share each row of tokens, where there are several.
        root: What gathers sharded weights around the forward pass, where there are several processes.
        varlen: Whether attention takes the kernel for sequences of varying length.
        files: Where the weights on the "meta" device are to be read from, once it is known which part of them is kept.
        longest_row: Most tokens of a sequence; None means any number. See `trainer_svc.engine.rope`.
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
        """Whether the network gives values."""
        return self.head != "language"

    def local_tokens(self, batch: MicroBatch) -> int:
        """Tokens of a micro-batch's row whose hidden states are computed here."""
        return batch.packed_tokens if self.context is None else self.context.width(batch)

    def outputs(self, batch: MicroBatch, *, entropy: Entropy = "none") -> Outputs:
        """Outputs at each loss token under the current weights.

        Args:
            batch: A micro-batch on the network's device.
            entropy: Whether to compute the entropy of the distribution at each token, in nats, and with a gradient.
        """
        return Outputs(*self.under_root(self._outputs, batch, entropy))

    def under_root(self, compute: Callable[..., Any], *arguments: Any) -> Any:  # noqa: ANN401  what `compute` gives
        """Call a function that runs modules of the model, with the weights that it needs gathered.

        Args:
            compute: Gives a tensor, or a tuple of tensors and None.
            arguments: What it is called with.
        """
        return compute(*arguments) if self.root is None else self.root(compute, *arguments)

    def _outputs(self, batch: MicroBatch, entropy: Entropy) -> tuple[PerToken | None, ...]:
        if self.own_head:
            outputs = self.read(self.hidden(batch), batch, entropy=entropy)
            return outputs.logprobs, outputs.entropy, outputs.values
        part, own = self._share(batch)
        with self._precision():
            logits = self._forward(self.model, part, input_ids=part.input_ids, logits_to_keep=part.predictors).logits[0]
            columns = logprobs_of_logits(logits, part.targets, part.temperatures, entropy=entropy)
        return self._gather(columns, own, batch)

    def _share(self, batch: MicroBatch) -> tuple[MicroBatch, torch.Tensor | None]:
        return (batch, None) if self.context is None else self.context.share(batch)

    def _gather(
        self, columns: tuple[PerToken | None, ...], own: torch.Tensor | None, batch: MicroBatch
    ) -> tuple[PerToken | None, ...]:
        if self.context is None or own is None:
            return columns
        return tuple(self.context.gather(columns, own, len(batch.targets)))

    def hidden(self, batch: MicroBatch, *, states: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states behind the last layer, of shape [packed, width]; of this process's slice where a row is shared.

        Args:
            batch: A micro-batch on the network's device.
            states: Hidden states that go into the first layer that is here; None: the tokens' embeddings.
        """
        batch, _ = self._share(batch)
        with self._precision():
            inputs = {"input_ids": batch.input_ids} if states is None else {"inputs_embeds": states.unsqueeze(0)}
            hidden: torch.Tensor = self._forward(self.model.base_model, batch, **inputs).last_hidden_state[0]
            return hidden

    def read(self, hidden: torch.Tensor, batch: MicroBatch, *, entropy: Entropy = "none") -> Outputs:
        """Outputs at each loss token, of the hidden states behind the last layer."""
        part, own = self._share(batch)
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
        return Outputs(*self._gather((*columns, values), own, batch))

    def _precision(self) -> torch.autocast:
        mixed = self.compute_dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=mixed)

    def _forward(self, module: torch.nn.Module, batch: MicroBatch, **options: Any) -> Any:  # noqa: ANN401  transformers' output classes
        return module(
            position_ids=batch.position_ids,
            packed=batch.attention,
            use_cache=False,
            **({} if self.context is None else {"context": self.context}),
            **({"varlen": True} if self.varlen else {}),
            **options,
        )


def _values(head: torch.nn.Module, states: torch.Tensor) -> PerToken:
    # float32 or wider, whatever the layers run in: a critic learns returns to more digits than bfloat16 has.
    with torch.autocast(states.device.type, enabled=False):
        return head(states if states.dtype == torch.float64 else states.float()).squeeze(-1)
