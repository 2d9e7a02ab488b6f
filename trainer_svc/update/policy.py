"""One update of the policy on one batch of samples."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import replace

from trainer_svc.engine.batch import Sequence
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.step_metrics import StepMetrics
from trainer_svc.objectives.aggregation import with_group_tokens
from trainer_svc.objectives.diagnostics import finish
from trainer_svc.objectives.objective import Objective
from trainer_svc.update.trainable import keep_trainable

__all__ = ["PolicyUpdate"]


class PolicyUpdate:
    """A policy and its objective: a batch of samples in, an optimizer step out.

    Args:
        engine: The policy in training.
        objective: What is minimised.
    """

    def __init__(self, engine: TrainEngine, objective: Objective) -> None:
        self.engine = engine
        self.objective = objective

    def apply(self, sequences: Rows[Sequence]) -> StepMetrics:
        """Train on a batch.

        Tokens that lack what the objective reads leave the loss and its divisor, and are counted. Sequences whose advantages
        are all zero are counted and, where the objective gives them no gradient, not forwarded.

        Raises:
            ValueError: if a token id is outside of the vocabulary, or a KL term lacks its reference.
        """
        kept, dropped = keep_trainable(sequences, self.objective)
        kept = with_group_tokens(kept)
        metrics = self.engine.train_batch(
            kept,
            self.objective.loss,
            self.objective.weight,
            contributes=self.objective.contributes,
            entropy=self.objective.entropy,
        )
        facts = self.engine.ranks.total(_advantage_sums(kept)) | {f"dropped_tokens/{k}": v for k, v in dropped.items()}
        return replace(metrics, measured=finish(metrics.sums) | _shares(facts))


def _advantage_sums(sequences: Rows[Sequence]) -> dict[str, float]:
    trained = [each.advantages[each.loss_mask] for each in sequences]
    return {
        "zero_advantage_sequences": float(sum(not bool(values.any()) for values in trained)),
        "tokens": float(sum(len(values) for values in trained)),
        "positive": float(sum(int((values > 0).sum()) for values in trained)),
        "negative": float(sum(int((values < 0).sum()) for values in trained)),
    }


def _shares(facts: Mapping[str, float]) -> dict[str, float]:
    """The shares of the loss tokens by the sign of their advantage, beside what is reported as it is."""
    measured = dict(facts)
    tokens = measured.pop("tokens")
    positive, negative = measured.pop("positive"), measured.pop("negative")
    if tokens:
        measured |= {"advantage_positive": positive / tokens, "advantage_negative": negative / tokens}
    return measured
