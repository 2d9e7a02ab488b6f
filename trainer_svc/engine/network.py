"""The network: loading a Hugging Face directory, and its outputs at packed loss tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from trainer_svc.engine.attention import PACKED_ATTENTION, AttentionPlan
from trainer_svc.engine.batch import MicroBatch
from trainer_svc.engine.fused_logprob import Entropy
from trainer_svc.engine.output_layer import logprobs_of_logits, logprobs_of_states
from trainer_svc.engine.outputs import Outputs
from trainer_svc.engine.shapes import PerToken

if TYPE_CHECKING:
    from trainer_svc.parallel.context import Context
    from trainer_svc.parallel.fsdp import Root

__all__ = ["Entropy", "Head", "Network", "load_network", "resolve_device", "resolve_dtype"]

Head = Literal["language", "value", "both"]
"""What a network has on top: logits of tokens, one value per token, or both on one trunk."""

PROBE_LENGTHS = (7, 4)
"""Tokens of the two sequences with which packing is checked at load; they share their first two."""

PROBE_TOLERANCE = 1e-3
"""Largest accepted difference of log-probabilities, in nats. float32 rounding stays below 1e-4; a missing feature is far above."""


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


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The precision of the forward pass that a config names: auto, float32 or bfloat16."""
    compute = {
        "auto": torch.bfloat16 if device.type == "cuda" else torch.float32,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
    }
    return compute[name]


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


def load_network(
    path: str,
    device: torch.device,
    *,
    head: Head = "language",
    dtype: torch.dtype = torch.float32,
    logit_cells: int = 3 << 24,
    gradient_checkpointing: bool = False,
) -> Network:
    """Load a causal transformer with float32 weights and check that packed training is exact for it.

    A value head that the directory does not hold begins at 0.

    Args:
        path: A Hugging Face directory or hub id.
        device: Where to compute.
        head: What it has on top. "value" loads a sequence classifier with one label, as transformers names it; "both" puts
            a module `value_head` on a language model.
        dtype: Precision of the forward pass.
        logit_cells: Most logits alive at once.
        gradient_checkpointing: Recompute activations in the backward pass.

    Raises:
        ValueError: if the architecture cannot be trained packed.
    """
    model = _load(path, head).to(device)
    model.eval()
    with torch.no_grad():
        own_head = _check_packing(Network(model, device, torch.float32, logit_cells, head=head))
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in model.modules():  # recomputing asks for training mode; dropout stays off all the same
            module.training = getattr(module, "gradient_checkpointing", False)
    if head == "both" and not own_head:
        raise ValueError(f"{type(model).__name__} makes its logits in its own way: give the critic a model of its own")
    value_head = {"language": None, "value": getattr(model, "score", None), "both": getattr(model, "value_head", None)}
    return Network(model, device, dtype, logit_cells, own_head, value_head[head], head)


def _load(path: str, head: Head) -> PreTrainedModel:
    if head == "value":
        classifier, loading = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=torch.float32, num_labels=1, output_loading_info=True
        )
        if not isinstance(getattr(classifier, "score", None), torch.nn.Linear):
            raise ValueError(
                f"{type(classifier).__name__} has no linear layer `score`: choose another model for values"
            )
        if "score.weight" in loading["missing_keys"]:
            torch.nn.init.zeros_(classifier.score.weight)  # a drawn one would begin with values far off all returns
        return classifier
    model, loading = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    if missing := sorted(loading["missing_keys"]):
        named = ", ".join(missing[:3])
        raise ValueError(f"{path} lacks {named}, which random weights would stand in for: name a whole language model")
    if head == "both":
        model.value_head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
        torch.nn.init.zeros_(model.value_head.weight)
    return model


def _check_packing(network: Network) -> bool:
    """Compare packed outputs with the model's own on single sequences.

    Returns:
        Whether the output embedding alone makes the logits.
    """
    model, device = network.model, network.device
    body = model if network.language else model.base_model
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(network.vocabulary, (length,), generator=generator) for length in PROBE_LENGTHS]
    rows[1][:2] = rows[0][:2]
    expected = torch.cat([_reading(body(row.to(device).unsqueeze(0)))[1:] for row in rows])
    model.set_attn_implementation(PACKED_ATTENTION)
    first, second = PROBE_LENGTHS
    plan = AttentionPlan.of([np.arange(first), np.r_[0, 1, first : first + second - 2]], first + second - 2).to(device)
    ids = torch.cat([rows[0], rows[1][2:]]).to(device).unsqueeze(0)
    positions = torch.cat([torch.arange(first), torch.arange(2, second)]).to(device).unsqueeze(0)
    keep = torch.tensor([*range(1, first), 1, *range(first, first + second - 2)], device=device)
    arguments = {"input_ids": ids, "position_ids": positions, "packed": plan, "use_cache": False}
    try:
        packed = _reading(body(**arguments)).index_select(0, keep)
    except TypeError as error:  # its forward does not hand keywords down
        raise ValueError(f"{type(model).__name__} cannot be trained packed ({error}): choose another model") from error
    gap = float((packed - expected).abs().max())
    if not gap <= PROBE_TOLERANCE:
        raise ValueError(
            f"{type(model).__name__} gives other log-probabilities when sequences are packed (by {gap:.3g} nats): its layers "
            "mix tokens outside of softmax attention, which packed training does not support; choose another model"
        )
    head = model.get_output_embeddings()
    if not network.language or head is None:
        return not network.language
    hidden = model.base_model(**arguments).last_hidden_state[0].index_select(0, keep)
    return bool((torch.log_softmax(head(hidden).float(), -1) - packed).abs().max() <= PROBE_TOLERANCE)


def _reading(output: Any) -> torch.Tensor:  # noqa: ANN401  transformers' output classes
    """What packing must not change: log-probabilities, or hidden states where there are none."""
    logits = getattr(output, "logits", None)
    return output.last_hidden_state[0].float() if logits is None else torch.log_softmax(logits[0].float(), -1)
