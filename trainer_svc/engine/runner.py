"""How the micro-batches of a step go through the network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import torch

from trainer_svc.batch.rows import MicroBatch, Outputs
from trainer_svc.batch.shapes import Scalar
from trainer_svc.engine.network import Entropy, Network
from trainer_svc.engine.step_metrics import StepRecord
from trainer_svc.parallel.pipeline import InFlight, Stage

__all__ = ["LossOf", "OneByOne", "Pipelined", "Runner"]

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


class Pipelined:
    """Passes micro-batches through the stages of a pipeline, of which this process is one.

    The last stage computes the loss. It then gives its outputs to the other stages, which compute the loss again without a
    gradient, so that every process reports the same step.

    Args:
        network: This stage's part of the network.
        stage: This process's place in the pipeline.
        tied: This stage's copy of a weight that the first and the last stage share.
        reshard: Whether sharded weights that were gathered for a micro-batch are given back before the next.
    """

    def __init__(
        self, network: Network, stage: Stage, tied: torch.nn.Parameter | None = None, *, reshard: bool = True
    ) -> None:
        self.network = network
        self.reshard = reshard
        self._stage = stage
        self._tied = tied

    def train(self, batches: Rows[MicroBatch], loss_of: LossOf, record: StepRecord, *, entropy: Entropy) -> None:
        """See `Runner`."""
        moved = [batch.to(self.network.device) for batch in batches]
        outputs: list[Outputs] = []
        open_backwards = len(moved)

        def forward(number: int, states: torch.Tensor | None) -> InFlight:
            batch = moved[number]
            with record.phase("forward"):
                if not self._stage.is_last:
                    return InFlight(states, self.network.under_root(self._states, batch, states))
                output = Outputs(*self.network.under_root(self._outputs, batch, states, entropy))
                outputs.append(output)
                loss = loss_of(output, batch)
                return InFlight(states, loss if batch.sequences else kept_company(loss, output))

        def backward(done: InFlight, gradient: torch.Tensor | None) -> torch.Tensor | None:
            nonlocal open_backwards
            open_backwards -= 1
            if self.network.root is not None:
                self.network.root.reduce(now=open_backwards == 0, keep=not self.reshard)
            with record.phase("backward"):
                torch.autograd.backward(done.result, None if gradient is None else gradient.to(done.result.dtype))
                return None if done.states is None else done.states.grad

        with abandoned_on_error(self.network):
            self._stage.train([self.network.local_tokens(batch) for batch in moved], forward, backward)
        with torch.no_grad():
            for batch, output in zip(moved, self._shared(moved, outputs, entropy), strict=True):
                if not self._stage.is_last:
                    loss_of(output, batch)
        if self._tied is not None:
            self._stage.add_tied_gradients(self._tied)

    def evaluate(
        self, batches: Rows[MicroBatch], take: Callable[[Outputs, MicroBatch], object], *, entropy: Entropy = "none"
    ) -> None:
        """See `Runner`."""
        moved = [batch.to(self.network.device) for batch in batches]
        outputs: list[Outputs] = []
        with abandoned_on_error(self.network), torch.no_grad():
            for batch in moved:
                states = self._stage.receive(self.network.local_tokens(batch))
                if self._stage.is_last:
                    outputs.append(Outputs(*self.network.under_root(self._outputs, batch, states, entropy)))
                else:
                    self._stage.send(self.network.under_root(self._states, batch, states))
            for batch, output in zip(moved, self._shared(moved, outputs, entropy), strict=True):
                take(output, batch)
        if self.network.root is not None:
            self.network.root.settle()

    def _states(self, batch: MicroBatch, states: torch.Tensor | None) -> torch.Tensor:
        return self.network.hidden(batch, states=states)

    def _outputs(
        self, batch: MicroBatch, states: torch.Tensor | None, entropy: Entropy
    ) -> tuple[torch.Tensor | None, ...]:
        read = self.network.read(self._states(batch, states), batch, entropy=entropy)
        return read.logprobs, read.entropy, read.values

    def _shared(self, batches: list[MicroBatch], outputs: list[Outputs], entropy: Entropy) -> list[Outputs]:
        """Return the outputs of the last stage, on every stage and without their gradient."""
        network = self.network
        columns = {
            "logprobs": network.language,
            "entropy": network.language and entropy != "none",
            "values": network.has_values,
        }
        shared: list[Outputs] = []
        for place, batch in enumerate(batches):
            received: dict[str, torch.Tensor] = {}
            for name in (name for name, there in columns.items() if there):
                column = getattr(outputs[place], name) if outputs else torch.empty_like(batch.temperatures)
                received[name] = self._stage.broadcast(column)
            shared.append(Outputs(**received))
        return shared


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
