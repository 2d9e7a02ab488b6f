"""The critic of PPO, with its own network or as a head on the policy's: its loss, its values, and how good these are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trainer_svc.batch.rows import LossFn, MicroBatch, Outputs, TrainingRow, count_loss_tokens
from trainer_svc.batch.shapes import Scalar
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.metrics import StepMetrics
from trainer_svc.objectives.advantages import clipped_value_loss
from trainer_svc.objectives.objective import Objective
from trainer_svc.parallel.mesh import ALONE, Ranks

CRITIC = "critic/"
"""Prefix of the names of all metrics about the critic."""


@dataclass(frozen=True, slots=True)
class Critic:
    """A network with a value head, and how it learns.

    Attributes:
        engine: The engine of a separate model with head "value", or the policy's engine with head "both".
        value_clip: How far a value may move in one update, in reward units; None: no bound.
        shared_coef: Weight of the value loss relative to the policy's loss, if they share a network.
        freeze_policy_steps: Optimizer steps that a critic with its own network makes before the policy's first.
    """

    engine: TrainEngine
    value_clip: float | None = None
    shared_coef: float = 0.5
    freeze_policy_steps: int = 0

    @property
    def shared(self) -> bool:
        """Whether the values come from the policy's own network."""
        return self.engine.network.language

    @property
    def warming_up(self) -> bool:
        """Whether the critic still learns alone. That depends on its own optimizer steps, which checkpoints hold."""
        return self.engine.optimizer_steps < self.freeze_policy_steps

    def step(self, sequences: Sequence[TrainingRow]) -> StepMetrics:
        """Make one step of a critic with its own network, on the mean value loss per token."""
        return self.engine.train_batch(sequences, self.loss, count_loss_tokens)

    def loss(self, outputs: Outputs, batch: MicroBatch) -> tuple[Scalar, dict[str, Scalar]]:
        """Return the summed value loss of a micro-batch; a `LossFn`.

        Raises:
            ValueError: if the batch has no old values or returns, or the network gives no values.
        """
        if outputs.values is None or batch.values is None or batch.returns is None:
            raise ValueError("the critic needs values, old values and returns: prepare the batch with its own network")
        losses, sums = clipped_value_loss(outputs.values, batch.values, batch.returns, value_clip=self.value_clip)
        total = losses.sum()
        return total, {
            **sums,
            "tokens": torch.full((), float(len(losses)), dtype=torch.float64, device=losses.device),
            "loss": total.detach(),
            "error": (outputs.values.detach() - batch.returns).square().sum(),
        }

    def beside(self, objective: Objective, sequences: Sequence[TrainingRow], ranks: Ranks = ALONE) -> LossFn:
        """Return the policy's loss and the value loss of a shared network as one loss with the objective's divisor.

        `sequences` are this rank's share of the minibatch.
        """
        own = {"policy": objective.weight(sequences), "tokens": count_loss_tokens(sequences)}
        divisors = ranks.total(own)
        # The engine divides the sum by the policy's weight, but the value loss is to be a mean over tokens.
        share = self.shared_coef * (divisors["policy"] or 1.0) / (divisors["tokens"] or 1.0)

        def loss(outputs: Outputs, batch: MicroBatch) -> tuple[Scalar, dict[str, Scalar]]:
            policy, sums = objective.loss(outputs, batch)
            value, value_sums = self.loss(outputs, batch)
            return policy + share * value, sums | {CRITIC + name: each for name, each in value_sums.items()}

        return loss


def value_facts(sequences: Sequence[TrainingRow], ranks: Ranks = ALONE) -> dict[str, float]:
    """Measure how well the critic predicted a batch before it learned from it.

    Returns:
        `explained_variance` = 1 - Var(return - value) / Var(return) over all loss tokens (1 is perfect, 0 as good as the
        mean, below 0 worse; left out if all returns are equal), `value_mean` and `return_mean` in reward units.
    """
    judged = [
        (each.values[each.loss_mask], each.returns[each.loss_mask])
        for each in sequences
        if each.values is not None and each.returns is not None
    ]
    values = torch.cat([torch.zeros(0), *(value for value, _ in judged)]).double()
    returns = torch.cat([torch.zeros(0), *(target for _, target in judged)]).double()
    errors = returns - values
    sums = ranks.total(
        {
            "tokens": float(len(values)),
            "values": float(values.sum()),
            "returns": float(returns.sum()),
            "errors": float(errors.sum()),
        }
    )
    tokens = sums["tokens"]
    if not tokens:
        return {}
    squares = ranks.total(
        {
            "returns": float((returns - sums["returns"] / tokens).square().sum()),
            "errors": float((errors - sums["errors"] / tokens).square().sum()),
        }
    )
    facts = {"value_mean": sums["values"] / tokens, "return_mean": sums["returns"] / tokens}
    if squares["returns"] > 0:
        facts["explained_variance"] = 1.0 - squares["errors"] / squares["returns"]
    return facts


def with_values(sequences: Sequence[TrainingRow], engine: TrainEngine) -> tuple[list[TrainingRow], list[float]]:
    """Add the critic's value of the state before each loss token.

    Returns:
        The rows, and for each row the value of the state after its last token: 0 unless the row is truncated.
    """
    read = engine.forward([_with_last_state(each) if each.truncated else each for each in sequences], values=True)
    rows = [replace(each, values=values[: len(each)]) for each, values in zip(sequences, read, strict=True)]
    after = [float(values[-1]) if each.truncated else 0.0 for each, values in zip(sequences, read, strict=True)]
    return rows, after


def _with_last_state(sequence: TrainingRow) -> TrainingRow:
    """Return the row with one more loss token at the end. The last state predicts it; the token itself is never forwarded."""
    return TrainingRow(
        input_ids=torch.cat([sequence.input_ids, sequence.input_ids[-1:]]),
        loss_mask=torch.cat([sequence.loss_mask, torch.ones(1, dtype=torch.bool)]),
        behaviour_logprobs=torch.cat([sequence.behaviour_logprobs, torch.full((1,), torch.nan)]),
        advantages=torch.cat([sequence.advantages, torch.zeros(1)]),
        temperature=sequence.temperature,
        group_id=sequence.group_id,
        trajectory_id=sequence.trajectory_id,
    )
