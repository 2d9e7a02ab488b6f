"""How the micro-batches of a step go through the network."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Protocol, TypeAlias

import torch

from trainer_svc.engine.batch import MicroBatch
from trainer_svc.engine.network import Entropy, Network
from trainer_svc.engine.outputs import Outputs
from trainer_svc.engine.shapes import Scalar
from trainer_svc.engine.step_metrics import StepRecord

__all__ = ["LossOf", "OneByOne", "Runner"]

LossOf: TypeAlias = Callable[[Outputs, MicroBatch], Scalar]
"""A micro-batch's share of the global loss."""


class Runner(Protocol):
    """Runs micro-batches; every data-parallel rank has the same number of them."""

    def train(self, batches: Rows[MicroBatch], loss_of: LossOf, record: StepRecord, *, entropy: Entropy) -> None:
        """Add the gradients of the losses to those of the parameters; when it returns they are summed over all ranks.

        Args:
            batches: Micro-batches; one without sequences keeps other ranks company.
            loss_of: Called once per micro-batch.
            record: Where phases are timed.
            entropy: Whether `loss_of` reads entropies, and with a gradient.
        """

    def evaluate(
        self, batches: Rows[MicroBatch], take: Callable[[Outputs, MicroBatch], object], *, entropy: Entropy = "none"
    ) -> None:
        """Hand over the outputs of each micro-batch in order, without a gradient."""


class OneByOne:
    """Forward and backward pass of one micro-batch after the other.

    Args:
        network: What they go through.
    """

    def __init__(self, network: Network) -> None:
        self.network = network

    def train(self, batches: Rows[MicroBatch], loss_of: LossOf, record: StepRecord, *, entropy: Entropy) -> None:
        """See `Runner`."""
        for batch in batches:
            with record.phase("forward"):
                moved = batch.to(self.network.device)
                outputs = self.network.outputs(moved, entropy=entropy)
                loss = loss_of(outputs, moved)
            with record.phase("backward"):
                loss.backward()

    def evaluate(
        self, batches: Rows[MicroBatch], take: Callable[[Outputs, MicroBatch], object], *, entropy: Entropy = "none"
    ) -> None:
        """See `Runner`."""
        with torch.no_grad():
            for batch in batches:
                moved = batch.to(self.network.device)
                take(self.network.outputs(moved, entropy=entropy), moved)
