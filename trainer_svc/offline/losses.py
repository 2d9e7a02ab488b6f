"""Losses of offline training: preferences (DPO, IPO), scores (Bradley-Terry), a teacher; and the figures to report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from trainer_svc.batch.rows import LossFn, LossWeight, MicroBatch, Outputs, TrainingRow
from trainer_svc.batch.shapes import Indices, PerPair, PerToken, Scalar
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import Objective
from trainer_svc.objectives.presets import kl_estimate
from trainer_svc.offline.config import DpoConfig
from trainer_svc.offline.data import CHOSEN, REJECTED


@dataclass(frozen=True, slots=True)
class Training:
    """The loss and the reported figures of one kind of offline training."""

    loss: LossFn
    weight: LossWeight
    """Returns the divisor of the summed loss."""
    figures: Callable[[Mapping[str, float]], dict[str, float]] = lambda _: {}
    """Computes the reported means from the sums of any number of steps."""
    whole_groups: bool = False
    """Whether the loss compares the rows of a group."""


def dpo(chosen_gain: PerPair, rejected_gain: PerPair, *, beta: float, label_smoothing: float = 0.0) -> PerPair:
    """-log sigmoid(beta (chosen - rejected)) (DPO, arXiv 2305.18290).

    Args:
        chosen_gain: log t - log ref of the chosen answers, summed over their tokens, in nats.
        rejected_gain: The same for the rejected answers.
        beta: Reward per nat of gain. A larger beta keeps the model nearer to the reference.
        label_smoothing: Share of pairs whose labels are assumed to be swapped (conservative DPO); below 0.5.
    """
    margin = beta * (chosen_gain - rejected_gain)
    return -(1.0 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)


def ipo(chosen_gain: PerPair, rejected_gain: PerPair, *, beta: float) -> PerPair:
    """(chosen - rejected - 1 / (2 beta))^2 of gains per token (IPO, arXiv 2310.12036).

    Args:
        chosen_gain: log t - log ref of the chosen answers, the mean over their tokens, in nats.
        rejected_gain: The same for the rejected answers.
        beta: Strength of the regularisation towards the reference. The target of the margin is 1 / (2 beta) nats per token.
    """
    return (chosen_gain - rejected_gain - 1.0 / (2.0 * beta)).square()


def bradley_terry(chosen_score: PerPair, rejected_score: PerPair, *, centering: float = 0.0) -> PerPair:
    """-log sigmoid(chosen - rejected) + centering (chosen + rejected)^2.

    The first term determines scores only up to a constant per prompt; the second pulls their mean to 0 (arXiv 2312.09244).
    """
    loss: torch.Tensor = -logsigmoid(chosen_score - rejected_score)
    return loss + centering * (chosen_score + rejected_score).square() if centering else loss


def pair_places(batch: MicroBatch) -> tuple[Indices, Indices]:
    """Return the indices of the chosen and of the rejected sequences of a micro-batch, pair by pair.

    Raises:
        ValueError: if a group is not a pair.
    """
    groups: dict[str, list[int]] = {}
    for place, sequence in enumerate(batch.sequences):
        groups.setdefault(sequence.group_id, []).append(place)
    rewards = [sequence.reward for sequence in batch.sequences]
    if any(sorted(rewards[place] or 0.0 for place in pair) != [REJECTED, CHOSEN] for pair in groups.values()):
        raise ValueError(
            "a group of this micro-batch is not a pair of a chosen and a rejected answer: pack whole groups"
        )
    first = [max(pair, key=lambda place: rewards[place] or 0.0) for pair in groups.values()]
    second = [min(pair, key=lambda place: rewards[place] or 0.0) for pair in groups.values()]
    # Without the dtype an empty list becomes float32, which cannot index. Ranks with fewer rows than others have empty micro-batches.
    return torch.tensor(first, dtype=torch.int64), torch.tensor(second, dtype=torch.int64)


def count_pairs(sequences: Sequence[TrainingRow]) -> float:
    """Return the divisor of a mean over pairs; a `LossWeight`."""
    return len(sequences) / 2


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """The loss of pairs against a reference; a `LossFn`."""

    config: DpoConfig

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Scalar, dict[str, Scalar]]:
        """Return the summed loss of a micro-batch's pairs, and sums for `preference_figures`.

        Raises:
            ValueError: if log-probabilities are missing, or a group is not a pair.
        """
        if outputs.logprobs is None or batch.reference_logprobs is None:
            raise ValueError("preferences need log-probabilities of the policy and of the reference")
        beta = self.config.beta
        chosen, rejected = (places.to(batch.owners.device) for places in pair_places(batch))
        drift = outputs.logprobs - batch.reference_logprobs
        gains = _sequence_sums(drift, batch)
        lengths = _sequence_sums(torch.ones_like(drift), batch)
        if self.config.objective == "ipo":
            means = gains / lengths
            losses = ipo(means[chosen], means[rejected], beta=beta)
        else:
            losses = dpo(gains[chosen], gains[rejected], beta=beta, label_smoothing=self.config.label_smoothing)
        if self.config.sft_weight:
            likelihood = _sequence_sums(outputs.logprobs, batch) / lengths
            losses = losses - self.config.sft_weight * likelihood[chosen]
        better, worse = beta * gains[chosen].detach(), beta * gains[rejected].detach()
        sums = {
            "pairs": torch.tensor(float(len(chosen)), device=losses.device),
            "tokens": torch.tensor(float(len(drift)), device=losses.device),
            "right": (better > worse).sum(),
            "margin": (better - worse).sum(),
            "reward_chosen": better.sum(),
            "reward_rejected": worse.sum(),
            "kl": kl_estimate("k3", outputs.logprobs.detach(), batch.reference_logprobs).sum(),
        }
        return losses.sum(), sums


def _sequence_sums(values: PerToken, batch: MicroBatch) -> torch.Tensor:
    """Return the sum over the loss tokens of each sequence."""
    return torch.zeros(len(batch.sequences), dtype=values.dtype, device=values.device).index_add(
        0, batch.owners, values
    )


def preference_figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Return means over pairs: `accuracy` (chosen rewarded more), `margin`, rewards (beta times the gain); `kl` (k3) per token."""
    names = {"accuracy": "right", "margin": "margin", "chosen": "reward_chosen", "rejected": "reward_rejected"}
    return _pair_means(sums, names) | {"kl": sums["kl"] / sums["tokens"]}


def _pair_means(sums: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    return {name: sums[key] / sums["pairs"] for name, key in names.items()}


@dataclass(frozen=True, slots=True)
class ScoreLoss:
    """The Bradley-Terry loss of pairs of scores, with the weight of their squared sum; a `LossFn`."""

    centering: float = 0.0

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Scalar, dict[str, Scalar]]:
        """Return the summed loss of a micro-batch's pairs, and sums for `score_figures`.

        Raises:
            ValueError: if a sequence has not exactly one value, or a group is not a pair.
        """
        values = outputs.values
        if values is None or len(values) != len(batch.sequences):
            raise ValueError("a reward model needs one value per answer: give it a value head and `ScoredAnswers`")
        chosen, rejected = (places.to(values.device) for places in pair_places(batch))
        losses = bradley_terry(values[chosen], values[rejected], centering=self.centering)
        better, worse = values[chosen].detach(), values[rejected].detach()
        sums = {
            "pairs": torch.tensor(float(len(chosen)), device=values.device),
            "right": (better > worse).sum(),
            "margin": (better - worse).sum(),
            "score": (better + worse).sum() / 2,
        }
        return losses.sum(), sums


def score_figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Return means over pairs: `accuracy` (chosen scored higher), `margin`, and the mean `score`."""
    return _pair_means(sums, {"accuracy": "right", "margin": "margin", "score": "score"})


class TeacherLoss:
    """The loss for a divergence from the teacher ("forward" or "reverse"), and sums for the distance to the teacher; a `LossFn`."""

    def __init__(self, divergence: str) -> None:
        preset, self.sign = ("sft", 1.0) if divergence == "forward" else ("distill", -1.0)
        self.objective = Objective.of(ObjectiveConfig(preset=preset))

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Scalar, dict[str, Scalar]]:
        """Return the summed loss of a micro-batch, and sums for `teacher_figures`.

        Raises:
            ValueError: if log-probabilities of the model or of the teacher are missing.
        """
        loss, sums = self.objective.loss(outputs, batch)
        if outputs.logprobs is None or batch.teacher_logprobs is None:
            raise ValueError("distillation needs log-probabilities of the model and of the teacher")
        gap = batch.teacher_logprobs - outputs.logprobs.detach()
        return loss, sums | {"teacher_gap": self.sign * gap.sum(), "distance": gap.abs().sum()}


def teacher_figures(sums: Mapping[str, float]) -> dict[str, float]:
    """Return means over learned tokens: `kl`, the estimated divergence per token in nats, and `distance`, the mean of absolute values.

    The estimate is valid if the texts are samples of the teacher (forward) or of the current model (reverse). Given texts can be
    samples of the current model only before the first step.
    """
    return {"kl": sums["teacher_gap"] / sums["tokens"], "distance": sums["distance"] / sums["tokens"]}
