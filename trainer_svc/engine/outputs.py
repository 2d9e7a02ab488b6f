"""What the network says about each loss token, and the two functions that make a loss of it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import TypeAlias

from trainer_svc.batch.rows import MicroBatch, Sequence
from trainer_svc.batch.shapes import PerToken, Scalar

__all__ = ["LossFn", "LossWeight", "Outputs", "count_loss_tokens"]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Outputs at the loss tokens of a micro-batch, with their gradients; float32 or wider.

    Attributes:
        logprobs: Log-probability of each token under the current weights, after temperature, in nats; None from a network
            that has values alone.
        entropy: Entropy of the distribution it was drawn from, in nats, where it was asked for.
        values: Value of the state before each token, where the network has a value head.
    """

    logprobs: PerToken | None = None
    entropy: PerToken | None = None
    values: PerToken | None = None

    @property
    def main(self) -> PerToken:
        """The log-probabilities, or the values of a network that has nothing else."""
        if self.logprobs is not None:
            return self.logprobs
        if self.values is None:
            raise ValueError("the network gave neither log-probabilities nor values")
        return self.values


LossFn: TypeAlias = Callable[[Outputs, MicroBatch], tuple[Scalar, dict[str, Scalar]]]
"""The sum of the losses of a micro-batch's tokens, and sums for the report; those named ``max_...`` are maxima."""

LossWeight: TypeAlias = Callable[[Rows[Sequence]], float]
"""The share of these sequences in what the summed loss is divided by: the shares of all ranks add up to the divisor."""


def count_loss_tokens(sequences: Rows[Sequence]) -> float:
    """The divisor of a mean over loss tokens."""
    return float(sum(int(sequence.loss_mask.sum()) for sequence in sequences))
