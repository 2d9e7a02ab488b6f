"""The policy network: loading a Hugging Face directory, and log-probabilities of packed loss tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

from trainer_svc.engine.attention import PACKED_ATTENTION, AttentionPlan
from trainer_svc.engine.batch import MicroBatch
from trainer_svc.engine.shapes import PerToken

__all__ = ["Entropy", "Policy", "load_policy", "resolve_device"]

Entropy = Literal["none", "measure", "train"]

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


@dataclass(frozen=True, slots=True)
class Policy:
    """A causal language model that computes log-probabilities of packed micro-batches.

    Attributes:
        model: The transformers model with float32 weights.
        device: Where it lies.
        compute_dtype: Precision of the forward pass.
        logit_cells: Most logits (tokens x vocabulary) alive at once.
        own_head: Whether logits are the output embedding of the last hidden state and nothing else; otherwise the
            model's own forward makes them, all at once.
    """

    model: PreTrainedModel
    device: torch.device
    compute_dtype: torch.dtype
    logit_cells: int
    own_head: bool

    @property
    def vocabulary(self) -> int:
        """Number of token ids that the model knows."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def logprobs(self, batch: MicroBatch, *, entropy: Entropy = "none") -> tuple[PerToken, PerToken | None]:
        """Log-probability of each loss token under the current weights, after temperature.

        Args:
            batch: A micro-batch on the policy's device.
            entropy: Whether to compute the entropy of the distribution at each token, in nats, and with a gradient.

        Returns:
            float32 (or wider) log-probabilities with their gradient, and the entropies or None.
        """
        mixed = self.compute_dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=mixed):
            if not self.own_head:
                logits = self._forward(self.model, batch, logits_to_keep=batch.predictors).logits[0]
                return _logprobs(logits, batch.targets, batch.temperatures, entropy=entropy)
            hidden = self._forward(self.model.base_model, batch).last_hidden_state[0]
            return self._from_hidden(hidden.index_select(0, batch.predictors), batch, entropy=entropy)

    def _forward(self, module: torch.nn.Module, batch: MicroBatch, **options: Any) -> Any:  # noqa: ANN401  transformers' output classes
        return module(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            packed=batch.attention,
            use_cache=False,
            **options,
        )

    def _from_hidden(
        self, hidden: torch.Tensor, batch: MicroBatch, *, entropy: Entropy
    ) -> tuple[PerToken, PerToken | None]:
        head = self.model.get_output_embeddings()

        def part(
            states: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
        ) -> tuple[PerToken, PerToken | None]:
            return _logprobs(head(states), targets, temperatures, entropy=entropy)

        rows = max(1, self.logit_cells // self.vocabulary)
        if len(hidden) <= rows:
            return part(hidden, batch.targets, batch.temperatures)
        pieces = zip(hidden.split(rows), batch.targets.split(rows), batch.temperatures.split(rows), strict=True)
        done = [checkpoint(part, *piece, use_reentrant=False) for piece in pieces]
        logprobs = torch.cat([logprob for logprob, _ in done])
        return logprobs, torch.cat([value for _, value in done]) if entropy != "none" else None


def _logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, *, entropy: Entropy
) -> tuple[PerToken, PerToken | None]:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scaled = torch.log_softmax(wide / temperatures.to(wide.dtype).unsqueeze(1), dim=-1)
    chosen = scaled.gather(1, targets.unsqueeze(1)).squeeze(1)
    if entropy == "none":
        return chosen, None
    spread = scaled if entropy == "train" else scaled.detach()
    return chosen, -(spread.exp() * spread).sum(-1)


def load_policy(
    path: str,
    device: torch.device,
    *,
    dtype: str = "auto",
    logit_cells: int = 1 << 25,
    gradient_checkpointing: bool = False,
) -> Policy:
    """Load a causal language model with float32 weights and check that packed training is exact for it.

    Args:
        path: A Hugging Face directory or hub id.
        device: Where to compute.
        dtype: Precision of the forward pass: auto, float32 or bfloat16.
        logit_cells: Most logits alive at once.
        gradient_checkpointing: Recompute activations in the backward pass.

    Raises:
        ValueError: if the architecture cannot be trained packed.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    model.eval()
    compute = {
        "auto": torch.bfloat16 if device.type == "cuda" else torch.float32,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
    }
    exact = Policy(model, device, torch.float32, logit_cells, own_head=True)
    with torch.no_grad():
        own_head = _check_packing(exact)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers recomputes in training mode only
    return Policy(model, device, compute[dtype], logit_cells, own_head)


def _check_packing(policy: Policy) -> bool:
    """Compare packed log-probabilities with the model's own on single sequences.

    Returns:
        Whether the output embedding alone makes the logits.
    """
    model, device = policy.model, policy.device
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(policy.vocabulary, (length,), generator=generator) for length in PROBE_LENGTHS]
    rows[1][:2] = rows[0][:2]
    expected = torch.cat(
        [torch.log_softmax(model(row.to(device).unsqueeze(0)).logits[0].float(), -1)[1:] for row in rows]
    )
    model.set_attn_implementation(PACKED_ATTENTION)
    first, second = PROBE_LENGTHS
    plan = AttentionPlan.of([np.arange(first), np.r_[0, 1, first : first + second - 2]], first + second - 2).to(device)
    ids = torch.cat([rows[0], rows[1][2:]]).to(device).unsqueeze(0)
    positions = torch.cat([torch.arange(first), torch.arange(2, second)]).to(device).unsqueeze(0)
    keep = torch.tensor([*range(1, first), 1, *range(first, first + second - 2)], device=device)
    arguments = {"input_ids": ids, "position_ids": positions, "packed": plan, "use_cache": False}
    try:
        logits = model(**arguments, logits_to_keep=keep).logits[0]
    except TypeError as error:  # its forward does not hand keywords down
        raise ValueError(f"{type(model).__name__} cannot be trained packed ({error}): choose another model") from error
    packed = torch.log_softmax(logits.float(), -1)
    gap = float((packed - expected).abs().max())
    if not gap <= PROBE_TOLERANCE:
        raise ValueError(
            f"{type(model).__name__} gives other log-probabilities when sequences are packed (by {gap:.3g} nats): its layers "
            "mix tokens outside of softmax attention, which packed training does not support; choose another model"
        )
    head = model.get_output_embeddings()
    if head is None:
        return False
    hidden = model.base_model(**arguments).last_hidden_state[0].index_select(0, keep)
    return bool((torch.log_softmax(head(hidden).float(), -1) - packed).abs().max() <= PROBE_TOLERANCE)
