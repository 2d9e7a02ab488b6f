"""How the micro-batches of a step go through the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import torch

from trainer_svc.batch.rows import MicroBatch
from trainer_svc.batch.shapes import Scalar
from trainer_svc.engine.network import Entropy, Network
from trainer_svc.engine.outputs import Outputs
from trainer_svc.engine.step_metrics import StepRecord

__all__ = ["LossOf", "OneByOne", "Runner", "abandoned_on_error", "kept_company"]

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
        reshard: Whether sharded weights that were gathered for a micro-batch are given back before the next.
    """

    def __init__(self, network: Network, *, reshard: bool = True) -> None:
        self.network = network
        self.reshard = reshard

    def train(self, batches: Rows[MicroBatch], loss_of: LossOf, record: StepRecord, *, entropy: Entropy) -> None:
        """See `Runner`."""
        with abandoned_on_error(self.network):
            for number, batch in enumerate(batches, 1):
                if self.network.root is not None:
                    self.network.root.reduce(now=number == len(batches), keep=not self.reshard)
                with record.phase("forward"):
                    moved = batch.to(self.network.device)
                    outputs = self.network.outputs(moved, entropy=entropy)
                    loss = loss_of(outputs, moved)
                with record.phase("backward"):
                    (loss if batch.sequences else kept_company(loss, outputs)).backward()

    def evaluate(
        self, batches: Rows[MicroBatch], take: Callable[[Outputs, MicroBatch], object], *, entropy: Entropy = "none"
    ) -> None:
        """See `Runner`."""
        with abandoned_on_error(self.network), torch.no_grad():
            for batch in batches:
                moved = batch.to(self.network.device)
                take(self.network.outputs(moved, entropy=entropy), moved)
        if self.network.root is not None:
            self.network.root.settle()


@contextmanager
def abandoned_on_error(network: Network) -> Iterator[None]:
    """Drop what a pass that fails leaves behind in the network, so that another one can follow."""
    try:
        yield
    except BaseException:
        if network.root is not None:
            network.root.abandon()
        raise


def kept_company(loss: Scalar, outputs: Outputs) -> Scalar:
    """The loss of no tokens, with the backward pass that other ranks exchange gradients in."""
    given = (outputs.logprobs, outputs.entropy, outputs.values)
    return loss + sum(column.sum() for column in given if column is not None and column.requires_grad)
