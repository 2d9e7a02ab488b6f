"""One objective put together from its choices."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Self

import torch

from trainer_svc.config import ObjectiveConfig
from trainer_svc.engine.batch import MicroBatch, Sequence
from trainer_svc.engine.network import Entropy
from trainer_svc.engine.outputs import Outputs
from trainer_svc.engine.shapes import Scalar
from trainer_svc.objectives.aggregation import divisor, sequence_factors
from trainer_svc.objectives.diagnostics import policy_gap
from trainer_svc.objectives.kl import kl_estimate
from trainer_svc.objectives.presets import PRESETS, Aggregation, KlKind
from trainer_svc.objectives.surrogates import SURROGATES, Surrogate
from trainer_svc.objectives.terms import TokenTerms

__all__ = ["Objective"]


@dataclass(frozen=True, slots=True)
class Objective:
    """A surrogate with its parameters, an aggregation, and optional KL and entropy terms.

    Attributes:
        surrogate: Loss per token.
        parameters: Its keyword arguments.
        aggregation: How token losses become one number.
        max_tokens: Divisor of aggregation `constant`.
        needs_behaviour: Whether behaviour log-probabilities are read.
        kl_coef: Weight of the KL term.
        kl_kind: Its estimator.
        entropy_coef: Weight of the entropy bonus.
    """

    surrogate: Surrogate
    parameters: Mapping[str, float]
    aggregation: Aggregation
    max_tokens: int | None = None
    needs_behaviour: bool = True
    kl_coef: float = 0.0
    kl_kind: KlKind = "k3"
    entropy_coef: float = 0.0

    @classmethod
    def of(cls, config: ObjectiveConfig) -> Self:
        """Look the preset up and lay the given parameters over its defaults."""
        preset = PRESETS[config.preset]
        given = {name: getattr(config, name) for name in preset.parameters if getattr(config, name) is not None}
        return cls(
            surrogate=SURROGATES[preset.surrogate],
            parameters={**preset.parameters, **given},
            aggregation=config.aggregation or preset.aggregation,
            max_tokens=config.max_tokens,
            needs_behaviour=preset.needs_behaviour,
            kl_coef=config.kl_coef,
            kl_kind=config.kl_kind,
            entropy_coef=config.entropy_coef,
        )

    @property
    def vanishes_without_advantage(self) -> bool:
        """Whether tokens of advantage 0 have neither loss nor gradient, so that their forward pass can be left out."""
        return self.needs_behaviour and self.kl_coef == 0 and self.entropy_coef == 0

    @property
    def entropy(self) -> Entropy:
        """What of the entropy has to be computed."""
        return "train" if self.entropy_coef > 0 else "measure"

    def contributes(self, sequence: Sequence) -> bool:
        """Whether a sequence can have a gradient."""
        return not self.vanishes_without_advantage or bool(sequence.advantages[sequence.loss_mask].any())

    def weight(self, sequences: Rows[Sequence]) -> float:
        """These sequences' share of the divisor; a `LossWeight`."""
        return divisor(self.aggregation, sequences, self.max_tokens)

    def loss(self, outputs: Outputs, batch: MicroBatch) -> tuple[Scalar, dict[str, Scalar]]:
        """The summed loss of a micro-batch, and sums for the step's report; a `LossFn`.

        Raises:
            ValueError: if a KL or an entropy term is wanted and its input is missing.
        """
        if outputs.logprobs is None:
            raise ValueError("the objective needs log-probabilities: give it a network with a language head")
        factors = sequence_factors(self.aggregation, batch.sequences).to(outputs.logprobs)
        return self.of_terms(
            TokenTerms(
                current=outputs.logprobs,
                behaviour=batch.behaviour_logprobs,
                proximal=batch.behaviour_logprobs,
                reference=batch.reference_logprobs,
                advantages=batch.advantages,
                owners=batch.owners,
                factors=factors[batch.owners],
                entropy=outputs.entropy,
            )
        )

    def of_terms(self, terms: TokenTerms) -> tuple[Scalar, dict[str, Scalar]]:
        """As `loss`, of terms alone.

        Raises:
            ValueError: if a KL or an entropy term is wanted and its input is missing.
        """
        loss, sums = self.surrogate(terms, **self.parameters)
        sums["tokens"] = torch.tensor(float(len(loss)), dtype=torch.float64, device=loss.device)
        if self.kl_coef > 0:
            if terms.reference is None:
                raise ValueError(
                    "kl_coef is above 0 but the batch has no reference log-probabilities: send them, or set kl_coef to 0"
                )
            kl = kl_estimate(self.kl_kind, terms.current, terms.reference)
            loss = loss + self.kl_coef * kl
            sums["kl"] = kl.detach().sum()
        if terms.entropy is not None:
            sums["entropy"] = terms.entropy.detach().sum()
        if self.entropy_coef > 0:
            if terms.entropy is None:
                raise ValueError("entropy_coef is above 0 but the entropy was not computed")
            loss = loss - self.entropy_coef * terms.entropy
        if self.needs_behaviour:
            sums |= policy_gap(terms)
        return (loss * terms.factors).sum(), sums
