"""The presets: the inputs of a loss, the losses per token, the terms that all losses share, and the table.

To add a preset, add its loss below (unless an existing one fits) and a row to `PRESETS`. Add a field to `ObjectiveConfig` for each
new parameter. Everything here is a pure function of the loss tokens; docs/objectives.md explains the letters. The code only calls
methods of tensors and does not import torch, because `--help` reads the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

    from trainer_svc.batch.rows import MicroBatch, TrainingRow
    from trainer_svc.batch.shapes import Indices, MaskPerToken, PerToken, Scalar

MAX_LOG_DIFFERENCE = 20.0
"""Clamp in nats. e^20 is far beyond every clip of a ratio. Without the clamp `exp` would overflow."""


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """The inputs of a loss: columns of the loss tokens of one micro-batch. A sequence never lies in two micro-batches.

    Attributes:
        current: log t; only this column and `entropy` carry a gradient.
        behaviour: log b, reported by the rollout engine.
        proximal: log o, a constant; equal to `behaviour` in the bypass form.
        advantages: A.
        owners: Index of the sequence of each token, within the micro-batch.
        sequences: Number of sequences in the micro-batch.
        factors: The aggregation's factor for each token's loss.
        reference: Log-probability under the frozen reference policy (log ref); None if unknown.
        teacher: Log-probability under a teacher; None if unknown.
        entropy: Entropy of the current policy at each token, in nats; None if it was not computed.
        kept: False drops a token from the numerator of the loss.
    """

    current: PerToken
    behaviour: PerToken
    proximal: PerToken
    advantages: PerToken
    owners: Indices
    sequences: int
    factors: PerToken
    reference: PerToken | None = None
    teacher: PerToken | None = None
    entropy: PerToken | None = None
    kept: MaskPerToken | None = None

    def sequence_sum(self, values: PerToken) -> PerToken:
        """Return, at each token, the sum over its sequence."""
        return values.new_zeros(self.sequences).index_add(0, self.owners, values)[self.owners]

    def sequence_mean(self, values: PerToken) -> PerToken:
        """Return, at each token, the mean over the loss tokens of its sequence."""
        return self.sequence_sum(values) / self.sequence_sum(values.new_ones(values.shape))


def log_difference(minuend: PerToken, subtrahend: PerToken) -> PerToken:
    """Return the difference of two log-probabilities, clamped so that its exponential is finite."""
    return (minuend - subtrahend).clamp(-MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE)


# Losses per token. q = t / b and r = t / o.


TokenLosses: TypeAlias = "tuple[PerToken, dict[str, Scalar]]"
"""The loss of every token, to be minimised, and sums over tokens for the report: how many a clip, truncation or mask affected."""

Surrogate: TypeAlias = Callable[..., TokenLosses]
"""`(terms, **parameters) -> (loss per token, sums)`; the names of the sums must not depend on the data."""


def truncated_importance(terms: TokenTerms, *, delta: float) -> TokenLosses:
    """-sg(min(q, delta)) A log t: the weight is truncated, the gradient is not (AIPO, arXiv 2505.24034)."""
    ratio = log_difference(terms.current.detach(), terms.behaviour).exp()
    loss = -ratio.clamp(max=delta) * terms.advantages * terms.current
    return loss, {"truncated": (ratio > delta).sum()}


def capped_importance(terms: TokenTerms, *, cap: float) -> TokenLosses:
    """-min(sg(q), cap) A log t: `truncated_importance` with the parameter name that RLOO and OPO use."""
    return truncated_importance(terms, delta=cap)


def clipped_ratio(terms: TokenTerms, *, eps_low: float, eps_high: float, dual_clip: float | None = None) -> TokenLosses:
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A) (PPO, arXiv 1707.06347).

    A token whose ratio has left the interval in the direction of its advantage has no gradient. With `dual_clip` c the
    objective of a token with A < 0 is at least c A, which bounds its loss where r is huge (arXiv 1912.09729).
    """
    ratio = log_difference(terms.current, terms.proximal).exp()
    return _clipped(ratio, terms.advantages, eps_low, eps_high, dual_clip)


def clipped_sequence_ratio(terms: TokenTerms, *, eps_low: float, eps_high: float) -> TokenLosses:
    """PPO's clip of s = exp(mean of log r over the sequence), as sg(s) t / sg(t) per token (GSPO, arXiv 2507.18071)."""
    gap = log_difference(terms.current.detach(), terms.proximal)
    ratio = terms.sequence_mean(gap).exp() * (terms.current - terms.current.detach()).exp()
    return _clipped(ratio, terms.advantages, eps_low, eps_high, None)


def _clipped(
    ratio: PerToken, advantages: PerToken, eps_low: float, eps_high: float, dual_clip: float | None
) -> TokenLosses:
    objective = (ratio * advantages).minimum(ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * advantages)
    counts = {
        "clipped_high": ((ratio > 1.0 + eps_high) & (advantages > 0)).sum(),
        "clipped_low": ((ratio < 1.0 - eps_low) & (advantages < 0)).sum(),
    }
    if dual_clip is not None:
        negative = advantages < 0
        objective = objective.maximum(dual_clip * advantages).where(negative, objective)
        counts["dual_clipped"] = (negative & (ratio > dual_clip)).sum()
    return -objective, counts


def clipped_weight(terms: TokenTerms, *, eps_low: float, eps_high: float) -> TokenLosses:
    """-sg(clip(r, 1 - eps_low, 1 + eps_high)) A log t: clipped tokens keep a gradient (CISPO, arXiv 2506.13585)."""
    ratio = log_difference(terms.current.detach(), terms.proximal).exp()
    loss = -ratio.clamp(1.0 - eps_low, 1.0 + eps_high) * terms.advantages * terms.current
    return loss, {"clipped_high": (ratio > 1.0 + eps_high).sum(), "clipped_low": (ratio < 1.0 - eps_low).sum()}


def divergence_masked(terms: TokenTerms, *, low: float, high: float) -> TokenLosses:
    """-q A, without the tokens whose probability moved too far in the direction of A (DPPO, arXiv 2602.04879).

    With the probabilities p, drop a token if A > 0 and p_t - p_b > high, or if A < 0 and p_b - p_t > low.
    """
    moved = terms.current.detach().exp() - terms.behaviour.exp()
    above, below = (terms.advantages > 0) & (moved > high), (terms.advantages < 0) & (-moved > low)
    return _masked(terms, below, above)


def distance_masked(terms: TokenTerms, *, threshold: float) -> TokenLosses:
    """-q A, without the tokens with abs(p_t - p_b) > threshold, whatever the sign of A."""
    moved = terms.current.detach().exp() - terms.behaviour.exp()
    return _masked(terms, -moved > threshold, moved > threshold)


def ratio_masked(terms: TokenTerms, *, low: float, high: float) -> TokenLosses:
    """-q A where low <= q <= high, else 0 (IcePop, arXiv 2510.18855)."""
    ratio = log_difference(terms.current.detach(), terms.behaviour).exp()
    return _masked(terms, ratio < low, ratio > high)


def _masked(terms: TokenTerms, below: MaskPerToken, above: MaskPerToken) -> TokenLosses:
    ratio = log_difference(terms.current, terms.behaviour).exp()
    loss = (-ratio * terms.advantages).where(~(below | above), 0.0)
    return loss, {"masked_low": below.sum(), "masked_high": above.sum()}


def pull_to_behaviour(terms: TokenTerms) -> PerToken:
    """Return (log t - log b)^2 where A is not 0, else 0: it pulls towards the policy that sampled (Kimi K2.5, arXiv 2602.02276).

    Tokens that a mask drops have this term, too. It is not clamped, because a clamp has no gradient for tokens beyond it. As in
    PRIME-RL, a token with advantage 0 has no such term, so that a row of such tokens still needs no forward pass.
    """
    return (terms.current - terms.behaviour).square().where(terms.advantages != 0, 0.0)


def soft_gate(terms: TokenTerms, *, tau_pos: float, tau_neg: float) -> TokenLosses:
    """-f(r) A with f(r) = 4 / tau sigmoid(tau (r - 1)), with tau_pos where A > 0, else tau_neg (SAPO, arXiv 2511.20347)."""
    ratio = log_difference(terms.current, terms.proximal).exp()
    tau = ratio.new_full(ratio.shape, tau_neg).masked_fill(terms.advantages > 0, tau_pos)
    return -4.0 / tau * (tau * (ratio - 1.0)).sigmoid() * terms.advantages, {}


def negative_log_likelihood(terms: TokenTerms) -> TokenLosses:
    """-log t, for demonstrations."""
    return -terms.current, {}


def reverse_kl_to_teacher(terms: TokenTerms) -> TokenLosses:
    """-sg(log t_teacher - log t) log t: the score-function gradient of KL(t || teacher) on the student's own tokens.

    Raises:
        ValueError: if the batch has no teacher log-probabilities.
    """
    if terms.teacher is None:
        raise ValueError("distill needs teacher log-probabilities: send them, or set teacher.model")
    gap = log_difference(terms.teacher, terms.current.detach())
    return -gap * terms.current, {"teacher_kl": -gap.sum()}


# Corrections f(rho) of the decoupled form, rho = o / b: constants that multiply the surrogate of each token.


CorrectionKind = Literal[
    "none", "token_tis", "sequence_tis", "sequence_mask", "geometric_mask", "token_mask", "k3_mask"
]
TokenWeights: TypeAlias = "tuple[PerToken, dict[str, Scalar]]"
"""A weight for each token, and counts of the tokens that were truncated or masked."""


def _log_rho(terms: TokenTerms) -> PerToken:
    return log_difference(terms.proximal, terms.behaviour)


def _sequence_rho(terms: TokenTerms) -> PerToken:
    """Return at each token the product of rho over its sequence. The product's logarithm is clamped like a single token's."""
    return terms.sequence_sum(_log_rho(terms)).clamp(-MAX_LOG_DIFFERENCE, MAX_LOG_DIFFERENCE).exp()


def none(terms: TokenTerms) -> TokenWeights:
    """1."""
    return terms.proximal.new_ones(terms.proximal.shape), {}


def token_tis(terms: TokenTerms, *, cap: float) -> TokenWeights:
    """min(rho, cap): truncated importance sampling per token."""
    return _truncated(_log_rho(terms).exp(), cap)


def sequence_tis(terms: TokenTerms, *, cap: float) -> TokenWeights:
    """min(product of rho over the sequence, cap), the same for each of its tokens."""
    return _truncated(_sequence_rho(terms), cap)


def _truncated(weights: PerToken, cap: float) -> TokenWeights:
    return weights.clamp(max=cap), {"correction_truncated": (weights > cap).sum()}


def sequence_mask(terms: TokenTerms, *, low: float, high: float) -> TokenWeights:
    """1 for sequences with low <= product of rho <= high, else 0."""
    return _mask(_sequence_rho(terms), low, high)


def geometric_mask(terms: TokenTerms, *, low: float, high: float) -> TokenWeights:
    """1 for sequences with low <= exp(mean log rho) <= high, else 0."""
    return _mask(terms.sequence_mean(_log_rho(terms)).exp(), low, high)


def _mask(values: PerToken, low: float, high: float) -> TokenWeights:
    below, above = values < low, values > high
    counts = {"correction_masked_low": below.sum(), "correction_masked_high": above.sum()}
    return (~(below | above)).to(values.dtype), counts


def token_mask(terms: TokenTerms, *, low: float, high: float) -> TokenWeights:
    """Rho where low <= rho <= high, else 0."""
    rho = _log_rho(terms).exp()
    inside, counts = _mask(rho, low, high)
    return rho * inside, counts


def k3_mask(terms: TokenTerms, *, threshold: float) -> TokenWeights:
    """1 for sequences whose mean of rho - log rho - 1 is at most `threshold`, else 0."""
    gap = _log_rho(terms)
    beyond = terms.sequence_mean(gap.exp() - gap - 1.0) > threshold
    return (~beyond).to(gap.dtype), {"correction_masked_high": beyond.sum()}


@dataclass(frozen=True, slots=True)
class Correction:
    """One f(rho).

    Attributes:
        weights: Computes the weight of each token.
        bounds: Its keyword arguments with their defaults: ratios, and nats for `k3_mask`.
    """

    weights: Callable[..., TokenWeights]
    bounds: Mapping[str, float] = field(default_factory=dict)


CORRECTIONS: Mapping[str, Correction] = MappingProxyType(
    {
        "none": Correction(none),
        "token_tis": Correction(token_tis, {"cap": 2.0}),
        "sequence_tis": Correction(sequence_tis, {"cap": 2.0}),
        "sequence_mask": Correction(sequence_mask, {"low": 0.5, "high": 2.0}),
        "geometric_mask": Correction(geometric_mask, {"low": 0.99, "high": 1.01}),
        "token_mask": Correction(token_mask, {"low": 0.5, "high": 5.0}),
        "k3_mask": Correction(k3_mask, {"threshold": 0.01}),
    }
)


# Masks of whole sequences. They take tokens out of the numerator of the loss, not out of the divisor.


def veto(terms: TokenTerms, threshold: float) -> TokenWeights:
    """0 for every token of a sequence that has one with rho < threshold, else 1."""
    impossible = (_log_rho(terms).exp() < threshold).to(terms.proximal.dtype)
    vetoed = terms.sequence_sum(impossible) > 0
    return (~vetoed).to(impossible.dtype), {"vetoed": vetoed.sum()}


def off_policy_sequence_mask(terms: TokenTerms, threshold: float) -> TokenWeights:
    """0 for tokens with A < 0 in sequences with mean(log b - log t) > threshold, else 1. It masks bad samples that are already rare."""
    drift = terms.sequence_mean(log_difference(terms.behaviour, terms.current.detach()))
    dropped = (terms.advantages < 0) & (drift > threshold)
    return (~dropped).to(drift.dtype), {"off_policy_masked": dropped.sum()}


# KL divergence from the current policy t to a frozen reference, estimated on samples of t. With x = log t - log ref per token:
# k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x. Source: J. Schulman, "Approximating KL divergence" (2020).


KlKind = Literal["k1", "k2", "k3"]

MAX_KL = 10.0
"""Clamp in nats per token. It keeps one token that the reference finds impossible from dominating the rewards of a batch."""

LINEAR_BELOW = -3.0
"""Nats. Below this x the k3 loss is linear: its gradient stays e^3 - 1 = 19.1 per nat instead of growing like exp(-x)."""


def kl_estimate(kind: KlKind, current: PerToken, reference: PerToken) -> PerToken:
    """Return the estimate per token, clamped to [-10, 10] nats: for rewards and reports, where no gradient flows."""
    x = log_difference(current, reference)
    match kind:
        case "k1":
            estimate = x
        case "k2":
            estimate = x.square() / 2
        case "k3":
            estimate = (-x).exp() - 1 + x
    return estimate.clamp(-MAX_KL, MAX_KL)


def kl_loss(kind: KlKind, current: PerToken, reference: PerToken) -> PerToken:
    """Return the estimate per token as a term of the loss. It is not clamped, because a clamp has no gradient for tokens beyond it.

    k3 continues linearly below x = -3: k3(x) = k3(-3) - (e^3 - 1)(x + 3). A policy that has fallen far below the reference is
    thus still pulled back, with a bounded gradient.

    Raises:
        ValueError: for k1. Its gradient is the gradient of log t, whose mean over the policy's own samples is zero.
    """
    x = current - reference
    match kind:
        case "k1":
            raise ValueError(
                "k1 cannot be a term of the loss: on-policy its expected gradient is zero, so it regularises nothing; "
                "use k2 or k3"
            )
        case "k2":
            return x.square() / 2
        case "k3":
            bounded = x.clamp(min=LINEAR_BELOW)
            return (-bounded).exp() - 1 + bounded + (1 - math.exp(-LINEAR_BELOW)) * (x - bounded)


# Aggregation: a factor per token, and a divisor that depends only on counts over the whole batch.
#
# | aggregation | factor of a token | divisor |
# |---|---|---|
# | token | 1 | loss tokens |
# | sequence | 1 / loss tokens of its sequence | sequences with a loss token |
# | prompt | 1 / loss tokens of its group | groups with a loss token |
# | constant | 1 | sequences with a loss token x `max_tokens` |


Aggregation = Literal["token", "sequence", "prompt", "constant"]


def token_factors(aggregation: Aggregation, batch: MicroBatch, dtype: torch.dtype) -> PerToken:
    """Return the factor of each loss token of a micro-batch, on the micro-batch's device."""
    match aggregation:
        case "token" | "constant":
            return batch.owners.new_ones(batch.owners.shape, dtype=dtype)
        case "sequence":
            return batch.sequence_tokens.to(dtype).reciprocal()
        case "prompt":
            return batch.group_tokens.to(dtype).reciprocal()


def divisor(aggregation: Aggregation, sequences: Sequence[TrainingRow], max_tokens: int | None = None) -> float:
    """Return these sequences' share of the divisor of the summed loss.

    Args:
        aggregation: How token losses become one number.
        sequences: Any part of the batch; the shares of disjoint parts add up.
        max_tokens: Longest completion in tokens; read only by `constant`.

    Raises:
        ValueError: if `constant` lacks `max_tokens`.
    """
    counts = [sequence.loss_tokens for sequence in sequences]
    match aggregation:
        case "token":
            return float(sum(counts))
        case "sequence":
            return float(sum(count > 0 for count in counts))
        case "prompt":
            pairs = zip(counts, sequences, strict=True)
            return sum(count / (each.group_loss_tokens or count) for count, each in pairs if count)
        case "constant":
            if max_tokens is None:
                raise ValueError("aggregation constant divides by max_tokens: set it")
            return float(sum(count > 0 for count in counts) * max_tokens)


# The table.


KlWhere = Literal["loss", "reward"]
Proximal = Literal["bypass", "recompute", "loglinear"]
Anchor = Literal["proximal", "behaviour", "none"]
Parameters = Mapping[str, float | None]

BATCH_ESTIMATORS: Mapping[str, Parameters] = MappingProxyType(
    {"gae": {"gamma": 1.0, "gae_lambda": 1.0}, "reinforce_pp": {"gamma": 1.0}, "process": {"turn_discount": None}}
)
"""Advantage estimators that the trainer runs before its epochs, with their parameters; None: off. The orchestrator runs the others, which need only rewards."""


@dataclass(frozen=True, slots=True)
class Preset:
    """The defaults of one objective.

    Attributes:
        surrogate: The loss per token; None: the user's own, which the setting `preset` names.
        advantage: The advantage estimator with which the objective was published; "" if it reads no advantages.
        anchor: What the ratio divides by: `proximal` (r = t / o), `behaviour` (q = t / b, which is its own correction), or
            `none` if there is no ratio.
        aggregation: How token losses become one number.
        parameters: Keyword arguments of the surrogate, with their defaults; None: off.
        other_parameters: Parameters that the surrogate does not read: of the additional term (dppo, ipo_mask, icepop), of the
            selection of tokens (m2po) or of the critic (ppo).
        proximal: Default source of the proximal policy.
        correction: Default correction of the decoupled form; None: the user must name one.
        kl_coef: Weight of the KL term.
        kl_kind: Estimator of the KL term.
        kl_where: Whether the KL term is part of the loss or of the reward.
        needs_teacher: Whether the loss reads a teacher's log-probabilities.
    """

    surrogate: Surrogate | None
    advantage: str
    anchor: Anchor = "proximal"
    aggregation: Aggregation = "token"
    parameters: Parameters = field(default_factory=dict)
    other_parameters: Parameters = field(default_factory=dict)
    proximal: Proximal = "bypass"
    correction: CorrectionKind | None = None
    kl_coef: float = 0.0
    kl_kind: KlKind = "k3"
    kl_where: KlWhere = "loss"
    needs_teacher: bool = False

    @property
    def needs_behaviour(self) -> bool:
        """Whether the loss reads the log-probabilities of the policy that sampled, and advantages."""
        return self.anchor != "none"

    @property
    def all_parameters(self) -> Parameters:
        """Return every parameter that a user may set for this preset, with its default."""
        return {**self.parameters, **self.other_parameters}


_CLIP: Parameters = {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": None}

_PULL: Parameters = {"kl_tau": 0.0}
"""Off by default: these presets are named after their masks, and the papers of the masks have no such term. PRIME-RL adds it with 1e-3."""

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        # arXiv 2505.24034
        "aipo": Preset(truncated_importance, "centered", anchor="behaviour", parameters={"delta": 4.0}),
        # arXiv 2402.03300
        "grpo": Preset(clipped_ratio, "grpo", aggregation="sequence", parameters=_CLIP),
        # arXiv 2503.14476
        "dapo": Preset(clipped_ratio, "grpo", parameters={**_CLIP, "eps_high": 0.28}),
        # arXiv 2503.20783
        "dr_grpo": Preset(clipped_ratio, "dr_grpo", aggregation="constant", parameters=_CLIP),
        # arXiv 2507.18071. The bounds are as narrow as the rounding differences between a bf16 engine and the trainer: a ratio
        # to b would be clipped by noise.
        "gspo": Preset(
            clipped_sequence_ratio,
            "grpo",
            aggregation="sequence",
            parameters={"eps_low": 3e-4, "eps_high": 4e-4},
            proximal="recompute",
            correction="token_tis",
        ),
        # arXiv 2402.14740
        "rloo": Preset(capped_importance, "rloo", anchor="behaviour", parameters={"cap": 2.0}),
        # arXiv 2505.23585
        "opo": Preset(capped_importance, "opo", anchor="behaviour", parameters={"cap": 2.0}),
        # arXiv 2506.13585
        "cispo": Preset(clipped_weight, "grpo", parameters={"eps_low": 1.0, "eps_high": 4.0}),
        # arXiv 1707.06347, dual clip 1912.09729
        "ppo": Preset(clipped_ratio, "gae", parameters=_CLIP, other_parameters={"value_clip": 0.5}),
        # arXiv 2501.03262
        "reinforce_pp": Preset(
            clipped_ratio, "reinforce_pp", parameters=_CLIP, kl_coef=0.001, kl_kind="k1", kl_where="reward"
        ),
        # arXiv 2602.04879
        "dppo": Preset(
            divergence_masked,
            "centered",
            anchor="behaviour",
            parameters={"low": 0.2, "high": 0.2},
            other_parameters=_PULL,
        ),
        # like dppo, with a bound that ignores the sign of A
        "ipo_mask": Preset(
            distance_masked, "centered", anchor="behaviour", parameters={"threshold": 0.1}, other_parameters=_PULL
        ),
        # arXiv 2510.18855
        "icepop": Preset(
            ratio_masked, "centered", anchor="behaviour", parameters={"low": 0.5, "high": 5.0}, other_parameters=_PULL
        ),
        # arXiv 2511.20347: a mean over the tokens of each response, then over responses
        "sapo": Preset(soft_gate, "grpo", aggregation="sequence", parameters={"tau_pos": 1.0, "tau_neg": 1.05}),
        # arXiv 2510.01161. Tokens are dropped by (log b - log o)^2, which is 0 everywhere in the bypass form.
        "m2po": Preset(
            clipped_ratio,
            "grpo",
            parameters=_CLIP,
            other_parameters={"tau": 0.04},
            proximal="recompute",
            correction="none",
        ),
        # maximum likelihood on demonstrations
        "sft": Preset(negative_log_likelihood, "", anchor="none"),
        # on-policy distillation, arXiv 2306.13649
        "distill": Preset(reverse_kl_to_teacher, "", anchor="none", needs_teacher=True),
    }
)
