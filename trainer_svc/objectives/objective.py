"""One objective put together from its choices: the loss of a micro-batch, and its share of the divisor."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from trainer_svc.engine.batch import MicroBatch, Sequence
from trainer_svc.engine.outputs import Outputs
from trainer_svc.engine.shapes import PerToken, Scalar
from trainer_svc.objectives.aggregation import divisor, token_factors
from trainer_svc.objectives.choices import Choices
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.corrections import CORRECTIONS, TokenWeights, off_policy_sequence_mask, veto
from trainer_svc.objectives.diagnostics import correction_spread, policy_gap
from trainer_svc.objectives.imported import check_parameters, find_surrogate
from trainer_svc.objectives.kl import kl_loss
from trainer_svc.objectives.surrogates import Surrogate, TokenLosses
from trainer_svc.objectives.terms import TokenTerms

if TYPE_CHECKING:
    from trainer_svc.engine.network import (
        Entropy,
    )  # which imports transformers: seconds that a loss alone does not need

__all__ = ["Objective"]


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of a policy on samples or demonstrations.

    Per token: surrogate(t, o, b, A) x f(rho) x masks + kl_coef x KL(t, ref) - entropy_coef x entropy. Masks and f(rho)
    concern the surrogate alone; divisors count every loss token, masked or not.

    Attributes:
        choices: What it consists of.
        surrogate: The loss per token.
    """

    choices: Choices
    surrogate: Surrogate

    @classmethod
    def of(cls, config: ObjectiveConfig) -> Self:
        """The objective that a config names.

        Raises:
            ValueError: if a surrogate of the user's own cannot be imported, or not be called with its `params`.
        """
        choices = config.choices
        surrogate = find_surrogate(choices.preset.surrogate)
        if ":" in choices.name:
            check_parameters(choices.name, surrogate, choices.parameters)
        return cls(choices, surrogate)

    @property
    def needs_behaviour(self) -> bool:
        """Whether behaviour log-probabilities and advantages are read."""
        return self.choices.preset.needs_behaviour

    @property
    def needs_proximal(self) -> bool:
        """Whether log o has to be computed by a forward pass before the first step."""
        return self.choices.proximal == "recompute"

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probabilities are read, by the loss or by the reward."""
        return self.choices.needs_reference

    @property
    def needs_teacher(self) -> bool:
        """Whether a teacher's log-probabilities are read."""
        return self.choices.preset.needs_teacher

    @property
    def needs_critic(self) -> bool:
        """Whether its advantages need the values of a critic."""
        return self.choices.needs_critic

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss has an entropy term."""
        return self.choices.entropy_coef > 0

    @property
    def entropy(self) -> Entropy:
        """What of the entropy has to be computed."""
        return "train" if self.needs_entropy else "measure"

    @property
    def vanishes_without_advantage(self) -> bool:
        """Whether tokens of advantage 0 have neither loss nor gradient, so that their forward pass can be left out."""
        own = ":" in self.choices.name
        return self.needs_behaviour and not own and self._loss_kl_coef == 0 and not self.needs_entropy

    @property
    def _loss_kl_coef(self) -> float:
        return self.choices.kl_coef if self.choices.kl_where == "loss" else 0.0

    def contributes(self, sequence: Sequence) -> bool:
        """Whether a sequence can have a gradient."""
        return not self.vanishes_without_advantage or bool(sequence.advantages[sequence.loss_mask].any())

    def weight(self, sequences: Rows[Sequence]) -> float:
        """These sequences' share of the divisor; a `LossWeight`."""
        return divisor(self.choices.aggregation, sequences, self.choices.max_tokens)

    def loss(self, outputs: Outputs, batch: MicroBatch) -> tuple[Scalar, dict[str, Scalar]]:
        """The summed loss of a micro-batch, and sums for the step's report; a `LossFn`.

        Raises:
            ValueError: if a column is missing that the objective reads.
        """
        return self.of_terms(self.terms(outputs, batch))

    def terms(self, outputs: Outputs, batch: MicroBatch) -> TokenTerms:
        """What the objective sees of a micro-batch.

        Raises:
            ValueError: if there are no log-probabilities, or log o is missing.
        """
        if outputs.logprobs is None:
            raise ValueError("the objective needs log-probabilities: give it a network with a language head")
        return TokenTerms(
            current=outputs.logprobs,
            behaviour=batch.behaviour_logprobs,
            proximal=self._proximal(outputs.logprobs.detach(), batch),
            advantages=batch.advantages,
            owners=batch.owners,
            sequences=len(batch.sequences),
            factors=token_factors(self.choices.aggregation, batch, outputs.logprobs.dtype),
            reference=batch.reference_logprobs,
            teacher=batch.teacher_logprobs,
            entropy=outputs.entropy,
            kept=batch.kept,
        )

    def _proximal(self, current: PerToken, batch: MicroBatch) -> PerToken:
        """Log o: of the engine, of a forward pass before the first step, or between the engine's and the current one."""
        match self.choices.proximal:
            case "bypass":
                return batch.behaviour_logprobs
            case "recompute":
                if batch.proximal_logprobs is None:
                    raise ValueError(
                        "the decoupled form needs proximal_logprobs: compute them before the first step, or set proximal to bypass"
                    )
                return batch.proximal_logprobs
            case "loglinear":
                if batch.proximal_share is None:
                    raise ValueError(
                        "proximal = loglinear needs proximal_share: derive it from the tokens' versions before the first step"
                    )
                return batch.behaviour_logprobs + batch.proximal_share * (current - batch.behaviour_logprobs)

    def of_terms(self, terms: TokenTerms) -> tuple[Scalar, dict[str, Scalar]]:
        """As `loss`, of terms alone.

        Raises:
            ValueError: if a column is missing that the objective reads.
        """
        loss, sums = self._surrogate(terms)
        sums["tokens"] = torch.full((), float(len(loss)), dtype=torch.float64, device=loss.device)
        for weights, counts in self._token_weights(terms):
            loss = loss * weights
            sums |= counts
        if self._loss_kl_coef > 0:
            if terms.reference is None:
                raise ValueError(
                    "kl_coef is above 0 but the batch has no reference log-probabilities: send them, name a reference model, "
                    "or set kl_coef to 0"
                )
            kl = kl_loss(self.choices.kl_kind, terms.current, terms.reference)
            loss = loss + self._loss_kl_coef * kl
            sums["kl"] = kl.detach().sum()
        if terms.entropy is not None:
            sums["entropy"] = terms.entropy.detach().sum()
        if self.needs_entropy:
            if terms.entropy is None:
                raise ValueError("entropy_coef is above 0 but the entropy was not computed")
            loss = loss - self.choices.entropy_coef * terms.entropy
        if self.needs_behaviour:
            sums |= policy_gap(terms)
        if self.choices.decoupled:
            sums |= correction_spread(terms)
        return (loss * terms.factors).sum(), sums

    def _surrogate(self, terms: TokenTerms) -> TokenLosses:
        loss, sums = self.surrogate(terms, **self.choices.parameters)
        if loss.shape != terms.current.shape:
            raise ValueError(
                f"objective {self.choices.name} returned shape {tuple(loss.shape)} for {len(terms.current)} tokens: "
                "return one loss per token and leave the aggregation to the config"
            )
        return loss, dict(sums)

    def _token_weights(self, terms: TokenTerms) -> list[TokenWeights]:
        """The constants that the surrogate of each token is multiplied by."""
        choices = self.choices
        weights: list[TokenWeights] = []
        if choices.decoupled:
            weights.append(CORRECTIONS[choices.correction](terms, **choices.bounds))
        if choices.veto is not None:
            weights.append(veto(terms, choices.veto))
        if choices.off_policy_mask is not None:
            weights.append(off_policy_sequence_mask(terms, choices.off_policy_mask))
        if terms.kept is not None:
            weights.append((terms.kept.to(terms.current.dtype), {"deselected": (~terms.kept).sum()}))
        return weights
