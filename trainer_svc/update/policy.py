"""One update of the policy on one batch of samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from time import perf_counter

import torch

from trainer_svc.batch.rows import Sequence
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.step_metrics import StepMetrics
from trainer_svc.objectives.aggregation import with_group_tokens
from trainer_svc.objectives.objective import Objective
from trainer_svc.objectives.prepare import check_columns, with_advantages, with_selection
from trainer_svc.objectives.trainable import CAUSES, keep_trainable
from trainer_svc.parallel.ranks import agree
from trainer_svc.update.columns import with_logprobs, with_values
from trainer_svc.update.critic import CRITIC, Critic, value_facts
from trainer_svc.update.minibatches import split_by_group
from trainer_svc.update.report import critic_report, update_report, warmup_report

__all__ = ["Passes", "PolicyUpdate", "Updated"]


@dataclass(frozen=True, slots=True)
class Passes:
    """How often a batch is gone through.

    Attributes:
        epochs: Times that each sequence is trained on.
        minibatches: Optimizer steps per epoch; batches of fewer groups make fewer.
        seed: Decides with the optimizer steps made before which groups share a minibatch.
    """

    epochs: int = 1
    minibatches: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Updated:
    """What an update did.

    Attributes:
        metrics: One report of all its steps, over all ranks.
        rows: For each of this rank's rows, in order, the number of its tokens in the loss and of applied optimizer steps
            that it was part of; int64 of shape [rows, 2].
        critic_only: Whether the critic learned alone, so that the policy did not change.
        skipped_steps: Optimizer steps, of the policy and of the critic, that were skipped as not finite.
    """

    metrics: StepMetrics
    rows: torch.Tensor
    critic_only: bool
    skipped_steps: int


@dataclass(slots=True)
class PolicyUpdate:
    """A policy, its objective and the models beside it: a batch of samples in, optimizer steps out.

    First what the objective reads is computed under the weights as they are: reference and teacher, the proximal policy,
    the critic's values, advantages that need them or the whole batch. Then the epochs are made, minibatch by minibatch.

    Attributes:
        engine: The policy in training.
        objective: What is minimised.
        passes: Epochs and minibatches.
        critic: Gives the values that gae reads, and learns.
        reference: The frozen policy of a KL term, for rows that bring no log-probabilities of it; only its forward runs.
        teacher: The model that distillation follows, likewise.
    """

    engine: TrainEngine
    objective: Objective
    passes: Passes = field(default_factory=Passes)
    critic: Critic | None = None
    reference: TrainEngine | None = None
    teacher: TrainEngine | None = None

    def __post_init__(self) -> None:
        if self.objective.resolved.needs_critic and self.critic is None:
            raise ValueError("gae needs the values of a critic: give one, or choose another advantage estimator")
        if self.critic is not None and self.critic.shared and self.critic.engine is not self.engine:
            raise ValueError("a critic with a language head shares the policy's network: give it the policy's engine")
        if self.critic is not None and self.critic.shared and self.critic.freeze_policy_steps:
            raise ValueError(
                "a critic on the policy's network cannot learn before the policy: set freeze_policy_steps to 0, or give it its own"
            )

    def apply(self, sequences: Rows[Sequence]) -> Updated:
        """Train on a batch.

        Tokens that lack what the objective reads leave the loss and its divisor, and are counted. Sequences whose advantages
        are all zero are counted and, where the objective gives them no gradient, not forwarded.

        Args:
            sequences: This rank's share of the batch. For `proximal = loglinear` with `proximal_share`.

        Raises:
            ValueError: if a token id is outside of the vocabulary, or a row lacks what the objective reads and no model
                gives it; on every rank, if it is so on one.
        """
        began = perf_counter()
        seconds: dict[str, float] = {}
        with _timed(seconds, "frozen"):
            rows = self._with_frozen(sequences)
        rows, dropped = agree(self.engine.ranks, partial(self._trainable, rows))
        rows = self._prepared(with_group_tokens(rows), seconds)
        losses = {f"dropped_tokens/{cause}": float(dropped.get(cause, 0)) for cause in CAUSES}
        measured = _shares(self.engine.ranks.total(_advantage_sums(rows) | losses))
        if self.critic is not None:
            judged = value_facts(rows, self.engine.ranks)
            measured |= {CRITIC + name: value for name, value in judged.items()}
        updated = self._train(rows)
        metrics = replace(
            updated.metrics,
            measured={**updated.metrics.measured, **measured},
            seconds={**updated.metrics.seconds, **seconds, "total": perf_counter() - began},
        )
        return replace(updated, metrics=metrics)

    def _with_frozen(self, sequences: Rows[Sequence]) -> list[Sequence]:
        """The rows with what models say that never change."""
        rows = list(sequences)
        if self.objective.resolved.needs_reference and self.reference is not None:
            rows = with_logprobs(rows, "reference_logprobs", self.reference)
        if self.objective.resolved.needs_teacher and self.teacher is not None:
            rows = with_logprobs(rows, "teacher_logprobs", self.teacher)
        return rows

    def _trainable(self, sequences: Rows[Sequence]) -> tuple[list[Sequence], dict[str, int]]:
        """The rows without the tokens that cannot be trained, where each has all columns that are read later."""
        check_columns(sequences, self.objective.resolved)
        return keep_trainable(sequences, self.objective.resolved)

    def _prepared(self, rows: list[Sequence], seconds: dict[str, float]) -> list[Sequence]:
        """The rows with what the weights in training say now, and the advantages and selections that follow from it."""
        objective, ranks = self.objective.resolved, self.engine.ranks
        after = None
        if objective.needs_proximal:
            with _timed(seconds, "proximal"):
                rows = with_logprobs(rows, "proximal_logprobs", self.engine)
        if self.critic is not None:
            with _timed(seconds, "values"):
                rows, after = with_values(rows, self.critic.engine)
        with _timed(seconds, "prepare"):
            rows = with_advantages(rows, objective, bootstraps=after, ranks=ranks)
            return with_selection(rows, objective, ranks)

    def _train(self, rows: list[Sequence]) -> Updated:
        """Make the epochs of the policy, then those of a critic with its own network.

        A batch is part of the critic's warm-up as a whole or not at all.
        """
        own = None if self.critic is None or self.critic.shared else self.critic
        alone = own if own is not None and own.warming_up else None
        places = self._epochs(rows, (alone or self).engine.optimizer_steps)
        epochs = [[[rows[place] for place in part] for part in parts] for parts in places]
        policy_steps = [] if alone else [[self._policy_step(part) for part in parts] for parts in epochs]
        critic_steps = [] if own is None else [own.step(part) for parts in epochs for part in parts]
        metrics = warmup_report(self._judged(rows), critic_steps) if alone else update_report(policy_steps)
        if self.critic is not None:
            metrics = self._with_critic(metrics, critic_steps if own else list(chain(*policy_steps)), own, alone)
        return Updated(
            metrics,
            rows=_row_outcomes(rows, chain(*places), critic_steps if alone else chain(*policy_steps)),
            critic_only=alone is not None,
            skipped_steps=sum(step.skipped for step in (*chain(*policy_steps), *critic_steps)),
        )

    def _with_critic(
        self, report: StepMetrics, steps: list[StepMetrics], own: Critic | None, alone: Critic | None
    ) -> StepMetrics:
        """Add what the critic learned to the report."""
        if self.critic is None:
            return report
        learned = critic_report(steps, shared=own is None)
        if self.critic.freeze_policy_steps:
            learned[f"{CRITIC}warmup"] = float(alone is not None)
        critic_s = sum(step.seconds["total"] for step in steps) if own is not None else 0.0
        return replace(report, measured={**report.measured, **learned}, seconds={**report.seconds, "critic": critic_s})

    def _epochs(self, rows: list[Sequence], before: int) -> list[list[list[int]]]:
        """The places of the rows in each minibatch of each epoch; the seed of their cuts depends on the steps made before, so that a resumed run cuts alike."""
        seeds = [f"{self.passes.seed}/{before}/{epoch}" for epoch in range(self.passes.epochs)]
        count, ranks = self.passes.minibatches, self.engine.ranks
        return [split_by_group(rows, count, seed=seed, ranks=ranks) for seed in seeds]

    def _judged(self, rows: Rows[Sequence]) -> StepMetrics:
        """The policy's loss and how far it is from the engine, of a forward pass alone."""
        objective = self.objective
        return self.engine.eval_batch(rows, objective.loss, objective.weight, entropy=objective.entropy)

    def _policy_step(self, part: Rows[Sequence]) -> StepMetrics:
        shared = self.critic is not None and self.critic.shared
        return self.engine.train_batch(
            part,
            self.critic.beside(self.objective, part, self.engine.ranks)
            if self.critic is not None and shared
            else self.objective.loss,
            self.objective.weight,
            # On a common trunk every sequence teaches the value head something.
            contributes=None if shared else self.objective.contributes,
            entropy=self.objective.entropy,
        )


def _row_outcomes(rows: Rows[Sequence], parts: Iterable[Rows[int]], steps: Iterable[StepMetrics]) -> torch.Tensor:
    """Return for each row its loss tokens and how many of the steps that it was part of were applied."""
    applied = [0] * len(rows)
    for part, step in zip(parts, steps, strict=True):
        for place in part:
            applied[place] += not step.skipped
    tokens = [int(each.loss_mask.sum()) for each in rows]
    return torch.tensor([tokens, applied], dtype=torch.int64).T.contiguous()


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = perf_counter()
    yield
    seconds[phase] = perf_counter() - start


def _advantage_sums(sequences: Rows[Sequence]) -> dict[str, float]:
    trained = [each.advantages[each.loss_mask] for each in sequences]
    return {
        "zero_advantage_sequences": float(sum(not bool(values.any()) for values in trained)),
        "tokens": float(sum(len(values) for values in trained)),
        "positive": float(sum(int((values > 0).sum()) for values in trained)),
        "negative": float(sum(int((values < 0).sum()) for values in trained)),
    }


def _shares(facts: Mapping[str, float]) -> dict[str, float]:
    """The shares of the loss tokens by the sign of their advantage, beside what is reported as it is; tokens that were dropped."""
    measured = {name: value for name, value in facts.items() if value or not name.startswith("dropped_tokens/")}
    tokens = measured.pop("tokens")
    positive, negative = measured.pop("positive"), measured.pop("negative")
    if tokens:
        measured |= {"advantage_positive": positive / tokens, "advantage_negative": negative / tokens}
    return measured
