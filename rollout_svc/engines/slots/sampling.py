"""Samples tokens from logits, for a batch whose rows have different parameters.

The order is vLLM's: bias and penalties on the logits, temperature, then min-p, top-k and top-p.
"""
# mypy: disable-error-code="name-defined"
# ruff: noqa: F722  (jaxtyping's axis names are strings, not forward references)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from rollout_svc.engines.base import Sampling

Logits: TypeAlias = Float[Tensor, "rows vocabulary"]
LogitsOfRow: TypeAlias = Float[Tensor, " vocabulary"]
PerRow: TypeAlias = Int64[Tensor, " rows"]
Uniform: TypeAlias = Float[Tensor, " rows"]

NEVER = float("-inf")


@dataclass(slots=True)
class RowSampling:
    """How one row is sampled.

    Attributes:
        generator: Its random numbers; None for the engine's shared ones.
    """

    sampling: Sampling
    prompt_ids: Sequence[int]
    token_ids: list[int]
    end_ids: frozenset[int]
    generator: np.random.Generator | None

    @property
    def edits_logits(self) -> bool:
        """Return whether the logits change before temperature."""
        sampling = self.sampling
        return bool(
            sampling.logit_bias
            or len(self.token_ids) < sampling.min_tokens
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or sampling.repetition_penalty != 1.0
        )


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token per row.

    Attributes:
        logprobs: Log-probabilities of the tokens in the distribution that they were drawn from; NaN where the model's output was not finite.
        top: For rows that ask for alternatives, (token, log-probability), most likely first; else empty.
    """

    token_ids: list[int]
    logprobs: list[float]
    top: list[list[tuple[int, float]]]


def draw(logits: Logits, rows: Sequence[RowSampling], shared: np.random.Generator) -> Drawn:
    """Draw the next token of each row.

    Each row uses one uniform number and the inverse of its cumulative distribution, so that a seeded row does not depend on
    the others.

    Args:
        logits: The model's output; changed in place where it is float32.
        rows: How to sample.
        shared: Random numbers of rows without their own.
    """
    logprobs = logprobs_of(logits, rows)
    uniform = shared.random(len(rows))
    for position, row in enumerate(rows):
        if row.generator is not None:
            uniform[position] = row.generator.random()
    chosen = _invert(logprobs, torch.from_numpy(uniform).to(logits.device))
    greedy = [position for position, row in enumerate(rows) if row.sampling.temperature == 0]
    if len(greedy) == len(rows):
        chosen = logprobs.argmax(-1)
    elif greedy:
        chosen[greedy] = logprobs[greedy].argmax(-1)
    given = logprobs.gather(1, chosen[:, None])[:, 0]
    return Drawn(chosen.tolist(), given.tolist(), _alternatives(logprobs, rows))


def logprobs_of(logits: Logits, rows: Sequence[RowSampling]) -> Logits:
    """Return the log-probabilities from which rows are sampled; for greedy rows, those at temperature 1."""
    logits = logits.float()
    for position, row in enumerate(rows):
        if row.edits_logits:
            _edit(logits[position], row)
    temperatures = [row.sampling.temperature or 1.0 for row in rows]
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    for position, row in enumerate(rows):
        sampling = row.sampling
        if sampling.temperature and (sampling.min_p or sampling.top_k or sampling.top_p < 1):
            logits[position] = _truncated(logits[position], sampling)
    return torch.log_softmax(logits, -1)


def _invert(logprobs: Logits, uniform: Uniform) -> PerRow:
    """Return the token at which the cumulative distribution passes the uniform number."""
    # In float64: with float32, the sum over a large vocabulary would drift by more than a rare token's probability.
    cumulated = logprobs.exp().cumsum(-1, dtype=torch.float64)
    targets = uniform.clamp(max=1 - 1e-12)[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, targets, right=True)[:, 0].clamp(max=logprobs.shape[1] - 1)


def _edit(logits: LogitsOfRow, row: RowSampling) -> None:
    """Apply bias, min_tokens and penalties in place."""
    sampling = row.sampling
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=logits.device)
        logits[ids] += torch.tensor(list(sampling.logit_bias.values()), device=logits.device)
    if len(row.token_ids) < sampling.min_tokens and row.end_ids:
        logits[torch.tensor(sorted(row.end_ids), device=logits.device)] = NEVER
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt_ids, *row.token_ids}), device=logits.device)
        before = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(before > 0, before / penalty, before * penalty)
    if row.token_ids and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = torch.tensor(row.token_ids, device=logits.device).unique(return_counts=True)
        logits[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts


def _truncated(logits: LogitsOfRow, sampling: Sampling) -> LogitsOfRow:
    """Return the logits with all but the most likely tokens excluded. The most likely one is always kept."""
    if sampling.min_p:
        logits = logits.masked_fill(logits < logits.max() + float(np.log(sampling.min_p)), NEVER)
    if not sampling.top_k and sampling.top_p >= 1:
        return logits
    ordered, ids = logits.sort(descending=True)
    if 0 < sampling.top_k < len(ordered):
        ordered[sampling.top_k :] = NEVER
    if sampling.top_p < 1:
        probabilities = ordered.softmax(-1)
        ordered[probabilities.cumsum(-1) - probabilities >= sampling.top_p] = NEVER
    return torch.empty_like(logits).scatter_(0, ids, ordered)


def _alternatives(logprobs: Logits, rows: Sequence[RowSampling]) -> list[list[tuple[int, float]]]:
    most = max(row.sampling.top_logprobs for row in rows)
    if most == 0:
        return [[] for _ in rows]
    values, ids = logprobs.topk(min(most, logprobs.shape[1]))
    pairs = zip(ids.tolist(), values.tolist(), rows, strict=True)
    return [list(zip(i, v, strict=True))[: row.sampling.top_logprobs] for i, v, row in pairs]
