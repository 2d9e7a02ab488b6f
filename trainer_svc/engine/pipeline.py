"""Pipeline parallelism: each process keeps some layers, and micro-batches pass through the processes.

    stage 0   f0 f1 f2 .. b0 f3 b1 ..        one forward, one backward (1F1B): a stage keeps at most as many
    stage 1      f0 f1 b0 f2 b1 ..           micro-batches as there are stages from it to the last
    stage 2         f0 b0 f1 b1 ..

Micro-batches are packed rows of different lengths. All stages have the same rows, so a stage knows how many tokens it will
receive. The schedules of `torch.distributed.pipelining` are not used, because they require one size for all micro-batches. Hidden
states travel as float32 (float64 for a float64 model), whatever precision the layers compute in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from trainer_svc.batch.rows import MicroBatch, Outputs
from trainer_svc.batch.shapes import Scalar
from trainer_svc.engine.logprob import Entropy
from trainer_svc.engine.metrics import StepRecord
from trainer_svc.engine.network import Network, connected
from trainer_svc.parallel.mesh import Mesh
from trainer_svc.parallel.sharding import tied_weight

LossOf: TypeAlias = Callable[[Outputs, MicroBatch], Scalar]
"""Returns a micro-batch's part of the global loss."""


class Pipeline:
    """Passes micro-batches through the stages of a pipeline. This process is one stage.

    The last stage computes the loss. Then it sends its outputs to the other stages. These compute the loss again without a
    gradient, so that every process reports the same step.

    Args:
        network: The layers of this stage.
        mesh: The processes; its `stages` are the pipeline.
        reshard: Whether to free sharded weights that were gathered for a micro-batch before the next one.

    Attributes:
        tied: This stage's copy of a weight that the first and the last stage share; None if it has none.
    """

    def __init__(self, network: Network, mesh: Mesh, *, reshard: bool) -> None:
        if mesh.stages is None:
            raise ValueError("a pipeline needs a mesh with stages: set trainer.parallel.pp above 1")
        self.network = network
        self.tied = tied_weight(network.model, mesh.place["pp"], mesh.dims.pp)
        self._reshard = reshard
        wide = any(parameter.dtype == torch.float64 for parameter in network.model.parameters())
        self._stage = _Stage(mesh.stages, network.width, network.device, wide=wide)

    def train(self, batches: Sequence[MicroBatch], loss_of: LossOf, record: StepRecord, *, entropy: Entropy) -> None:
        """Add the gradients of the losses, summed over all ranks, to the parameters' gradients.

        Every data-parallel rank has the same number of micro-batches. `loss_of` is called once per micro-batch.
        """
        moved = [batch.to(self.network.device) for batch in batches]
        outputs: list[Outputs] = []
        open_backwards = len(moved)

        def forward(number: int, states: torch.Tensor | None) -> _InFlight:
            batch = moved[number]
            with record.phase("forward"):
                if not self._stage.is_last:
                    return _InFlight(states, self.network.under_root(self.network.hidden, batch, states))
                output = Outputs(*self.network.under_root(self._outputs, batch, states, entropy))
                outputs.append(output)
                loss = loss_of(output, batch)
                return _InFlight(states, loss if batch.sequences else connected(loss, output))

        def backward(done: _InFlight, gradient: torch.Tensor | None) -> torch.Tensor | None:
            nonlocal open_backwards
            open_backwards -= 1
            if self.network.root is not None:
                self.network.root.prepare_backward(last=open_backwards == 0, keep_gathered=not self._reshard)
            with record.phase("backward"):
                torch.autograd.backward(done.result, None if gradient is None else gradient.to(done.result.dtype))
                return None if done.states is None else done.states.grad

        with self.network.reset_on_error():
            self._stage.train([self.network.local_tokens(batch) for batch in moved], forward, backward)
        with torch.no_grad():
            for batch, output in zip(moved, self._shared(moved, outputs, entropy), strict=True):
                if not self._stage.is_last:
                    loss_of(output, batch)
        if self.tied is not None:
            self._stage.add_tied_gradients(self.tied)

    def evaluate(
        self, batches: Sequence[MicroBatch], consume: Callable[[Outputs, MicroBatch], object], *, entropy: Entropy
    ) -> None:
        """Pass the outputs of each micro-batch to `consume`, in order and without a gradient."""
        moved = [batch.to(self.network.device) for batch in batches]
        outputs: list[Outputs] = []
        with self.network.reset_on_error(), torch.no_grad():
            for batch in moved:
                states = self._stage.exchange(self._stage.previous, receive=self.network.local_tokens(batch))
                if self._stage.is_last:
                    outputs.append(Outputs(*self.network.under_root(self._outputs, batch, states, entropy)))
                else:
                    own = self.network.under_root(self.network.hidden, batch, states)
                    self._stage.exchange(self._stage.next, send=own)
            for batch, output in zip(moved, self._shared(moved, outputs, entropy), strict=True):
                consume(output, batch)

    def _outputs(
        self, batch: MicroBatch, states: torch.Tensor | None, entropy: Entropy
    ) -> tuple[torch.Tensor | None, ...]:
        return self.network.read(self.network.hidden(batch, states), batch, entropy=entropy)

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


class _InFlight(NamedTuple):
    """The hidden states that a stage received (None on the first), and its result from them (the loss on the last)."""

    states: torch.Tensor | None
    result: torch.Tensor


_Forward = Callable[[int, torch.Tensor | None], _InFlight]
"""Takes the number of a micro-batch and the hidden states that the stage received, and runs the forward pass."""

_Backward = Callable[[_InFlight, torch.Tensor | None], torch.Tensor | None]
"""Takes the gradient of a result, runs the backward pass, and returns the gradient of the received states."""


class _Stage:
    """One process's place in the pipeline: its schedule of passes, and its exchanges with the other stages.

    Hidden states travel as float64 if `wide`. The group has one process per stage, in order.
    """

    def __init__(self, group: dist.ProcessGroup, width: int, device: torch.device, *, wide: bool) -> None:
        self._group, self._width, self._device = group, width, device
        self._dtype = torch.float64 if wide else torch.float32
        stage, stages = dist.get_rank(group), dist.get_world_size(group)
        self.previous = stage - 1 if stage > 0 else None
        self.next = stage + 1 if stage + 1 < stages else None
        self._ahead = stages - stage - 1

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the outputs."""
        return self.next is None

    def train(self, tokens: Sequence[int], forward: _Forward, backward: _Backward) -> None:
        """Run the schedule: every stage calls it with the same micro-batches.

        `tokens` has, for each micro-batch, the number of tokens whose hidden states this process computes. `forward` and
        `backward` are called once per micro-batch, in order.
        """
        ahead = min(self._ahead, len(tokens))
        in_flight: deque[tuple[int, _InFlight]] = deque()
        for number in range(ahead):
            current = forward(number, self.exchange(self.previous, receive=tokens[number]))
            self.exchange(self.next, send=current.result)
            in_flight.append((number, current))
        steady = range(ahead, len(tokens))
        states = self.exchange(self.previous, receive=tokens[ahead]) if steady else None
        for number in steady:
            current = forward(number, states)
            in_flight.append((number, current))
            oldest, done = in_flight.popleft()
            gradient = self.exchange(self.next, send=current.result, receive=tokens[oldest])
            following = tokens[number + 1] if number + 1 < len(tokens) else None
            states = self.exchange(self.previous, send=backward(done, gradient), receive=following)
        for number, done in in_flight:
            self.exchange(self.previous, send=backward(done, self.exchange(self.next, receive=tokens[number])))

    def broadcast(self, column: torch.Tensor) -> torch.Tensor:
        """Return the last stage's column on every stage, without a gradient. The other stages pass memory of the same shape."""
        shared = column.detach().to(self._dtype).contiguous()
        last = dist.get_global_rank(self._group, dist.get_world_size(self._group) - 1)
        dist.broadcast(shared, src=last, group=self._group)
        return shared

    def add_tied_gradients(self, tied: nn.Parameter) -> None:
        """Sum the gradients of a tied weight's copies on the first and the last stage, so that the copies stay equal."""
        gradient = tied.grad if tied.grad is not None else torch.zeros_like(tied)
        if isinstance(gradient, DTensor):  # an embedding's gradient may be whole although its weight is sharded
            gradient = gradient.redistribute(placements=tied.placements)
        tied.grad = gradient
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        other = torch.empty_like(own)
        peer = dist.get_world_size(self._group) - 1 if self.previous is None else 0
        self._transfer([(dist.isend, own.contiguous(), peer), (dist.irecv, other, peer)])
        own.add_(other)

    def exchange(
        self, neighbour: int | None, *, send: torch.Tensor | None = None, receive: int | None = None
    ) -> torch.Tensor | None:
        """Send a tensor to a neighbour, receive `receive` tokens from it, and return them. Without a neighbour do nothing."""
        if neighbour is None:
            return None
        transfers: list[tuple[Callable[..., Any], torch.Tensor, int]] = []
        received: torch.Tensor | None = None
        if send is not None:
            transfers.append((dist.isend, send.detach().to(self._dtype).contiguous(), neighbour))
        if receive is not None:
            received = torch.empty((receive, self._width), dtype=self._dtype, device=self._device, requires_grad=True)
            transfers.append((dist.irecv, received.detach(), neighbour))
        self._transfer(transfers)
        return received

    def _transfer(self, transfers: list[tuple[Callable[..., Any], torch.Tensor, int]]) -> None:
        operations = [dist.P2POp(kind, tensor, group=self._group, group_peer=peer) for kind, tensor, peer in transfers]
        for transfer in dist.batch_isend_irecv(operations) if operations else ():
            transfer.wait()
