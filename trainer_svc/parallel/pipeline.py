"""A pipeline of stages: micro-batches go through the layers from process to process, one forward, one backward.

    stage 0   f0 f1 f2 .. b0 f3 b1 ..        a stage keeps at most as many micro-batches as there are
    stage 1      f0 f1 b0 f2 b1 ..           stages from it to the last
    stage 2         f0 b0 f1 b1 ..

Rows are packed and micro-batches differ in length, which every stage knows, since all of them have the same rows. Hidden
states travel as float32 (float64 for a float64 model), whatever they are computed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer_svc.batch.rows import MicroBatch
from trainer_svc.engine.network import Entropy, Network
from trainer_svc.engine.outputs import Outputs
from trainer_svc.engine.runner import LossOf, abandoned_on_error, kept_company
from trainer_svc.engine.step_metrics import StepRecord

__all__ = ["Pipeline"]


class _UnderWay(NamedTuple):
    """A micro-batch whose backward pass is still to come: the states that went in, and the states or the loss that came out."""

    states: torch.Tensor | None
    result: torch.Tensor


class Pipeline:
    """Runs micro-batches through one stage, in step with the others.

    The loss is computed on the last stage. Its outputs are then handed to the others, which compute it again, so that every
    process reports the same step.

    Args:
        network: This stage's part of the network, cut by `cut_stage`.
        group: One process per stage, in order.
        tied: This stage's copy of a weight that the first and the last stage share.
        reshard: Whether sharded weights that were gathered for a micro-batch are given back before the next.
    """

    def __init__(
        self,
        network: Network,
        group: dist.ProcessGroup,
        tied: torch.nn.Parameter | None = None,
        *,
        reshard: bool = True,
    ) -> None:
        self.network = network
        self.reshard = reshard
        self._group = group
        stage, stages = dist.get_rank(group), dist.get_world_size(group)
        self._before = stage - 1 if stage > 0 else None
        self._behind = stage + 1 if stage + 1 < stages else None
        self._ahead = stages - stage - 1
        self._tied = tied

    def train(self, batches: Rows[MicroBatch], loss_of: LossOf, record: StepRecord, *, entropy: Entropy) -> None:
        """See `trainer_svc.engine.runner.Runner`."""
        moved = [batch.to(self.network.device) for batch in batches]
        outputs: list[Outputs] = []
        open_backwards = len(moved)

        def forward(batch: MicroBatch, states: torch.Tensor | None) -> _UnderWay:
            with record.phase("forward"):
                if self._behind is not None:
                    return _UnderWay(states, self.network.under_root(self._states, batch, states))
                output = Outputs(*self.network.under_root(self._outputs, batch, states, entropy))
                outputs.append(output)
                loss = loss_of(output, batch)
                return _UnderWay(states, loss if batch.sequences else kept_company(loss, output))

        def backward(done: _UnderWay, gradient: torch.Tensor | None) -> torch.Tensor | None:
            nonlocal open_backwards
            open_backwards -= 1
            if self.network.root is not None:
                self.network.root.reduce(now=open_backwards == 0, keep=not self.reshard)
            with record.phase("backward"):
                torch.autograd.backward(done.result, None if gradient is None else gradient.to(done.result.dtype))
                return None if done.states is None else done.states.grad

        with abandoned_on_error(self.network):
            self._one_forward_one_backward(moved, forward, backward)
        with torch.no_grad():
            for batch, output in zip(moved, self._told(moved, outputs, entropy), strict=True):
                if self._behind is not None:
                    loss_of(output, batch)
        self._add_tied_gradients()

    def evaluate(
        self, batches: Rows[MicroBatch], take: Callable[[Outputs, MicroBatch], object], *, entropy: Entropy = "none"
    ) -> None:
        """See `trainer_svc.engine.runner.Runner`."""
        moved = [batch.to(self.network.device) for batch in batches]
        outputs: list[Outputs] = []
        with abandoned_on_error(self.network), torch.no_grad():
            for batch in moved:
                states = self._pass(self._before, receive=batch)
                if self._behind is None:
                    outputs.append(Outputs(*self.network.under_root(self._outputs, batch, states, entropy)))
                else:
                    self._pass(self._behind, send=self.network.under_root(self._states, batch, states))
            for batch, output in zip(moved, self._told(moved, outputs, entropy), strict=True):
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

    def _one_forward_one_backward(
        self,
        batches: list[MicroBatch],
        forward: Callable[[MicroBatch, torch.Tensor | None], _UnderWay],
        backward: Callable[[_UnderWay, torch.Tensor | None], torch.Tensor | None],
    ) -> None:
        """The order of work. A send and a receive between the same neighbours are one exchange: neither waits for ever."""
        ahead = min(len(batches), self._ahead)
        under_way: deque[tuple[MicroBatch, _UnderWay]] = deque()
        for batch in batches[:ahead]:
            current = forward(batch, self._pass(self._before, receive=batch))
            self._pass(self._behind, send=current.result)
            under_way.append((batch, current))
        steady = batches[ahead:]
        states = self._pass(self._before, receive=steady[0]) if steady else None
        for batch, upcoming in zip(steady, [*steady, None][1:], strict=True):
            current = forward(batch, states)
            under_way.append((batch, current))
            oldest, done = under_way.popleft()
            gradient = self._pass(self._behind, send=current.result, receive=oldest)
            states = self._pass(self._before, send=backward(done, gradient), receive=upcoming)
        for batch, done in under_way:
            self._pass(self._before, send=backward(done, self._pass(self._behind, receive=batch)))

    def _pass(
        self, neighbour: int | None, *, send: torch.Tensor | None = None, receive: MicroBatch | None = None
    ) -> torch.Tensor | None:
        """Exchange hidden states or their gradients with a neighbour; None where there is no such stage or nothing comes."""
        if neighbour is None:
            return None
        transfers: list[dist.P2POp] = []
        received: torch.Tensor | None = None
        if send is not None:
            outgoing = send.detach().to(self._wire_dtype).contiguous()
            transfers.append(dist.P2POp(dist.isend, outgoing, group=self._group, group_peer=neighbour))
        if receive is not None:
            shape = (self.network.local_tokens(receive), self.network.width)
            received = torch.empty(shape, dtype=self._wire_dtype, device=self.network.device, requires_grad=True)
            transfers.append(dist.P2POp(dist.irecv, received.detach(), group=self._group, group_peer=neighbour))
        for transfer in dist.batch_isend_irecv(transfers) if transfers else ():
            transfer.wait()
        return received

    @property
    def _wire_dtype(self) -> torch.dtype:
        wide = any(parameter.dtype == torch.float64 for parameter in self.network.model.parameters())
        return torch.float64 if wide else torch.float32

    def _told(self, batches: list[MicroBatch], outputs: list[Outputs], entropy: Entropy) -> list[Outputs]:
        """The outputs of the last stage, on every stage and without their gradient."""
        last = dist.get_global_rank(self._group, dist.get_world_size(self._group) - 1)
        columns: Mapping[str, bool] = {
            "logprobs": self.network.language,
            "entropy": self.network.language and entropy != "none",
            "values": self.network.has_values,
        }
        told: list[Outputs] = []
        for place, batch in enumerate(batches):
            heard: dict[str, torch.Tensor | None] = {}
            for name in (name for name, there in columns.items() if there):
                own = getattr(outputs[place], name) if outputs else batch.targets.new_empty(len(batch.targets))
                heard[name] = own.detach().to(self._wire_dtype).contiguous()
                dist.broadcast(heard[name], src=last, group=self._group)
            told.append(Outputs(**heard))
        return told

    def _add_tied_gradients(self) -> None:
        """The first and the last stage add up the gradients of their copies of a tied weight, which stay equal by that."""
        if self._tied is None:
            return
        gradient = self._tied.grad if self._tied.grad is not None else torch.zeros_like(self._tied)
        if isinstance(gradient, DTensor):  # an embedding's may come whole where its weight is cut
            gradient = gradient.redistribute(placements=self._tied.placements)
        self._tied.grad = gradient
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        other = torch.empty_like(own)
        peer = dist.get_world_size(self._group) - 1 if self._before is None else 0
        transfers = [
            dist.P2POp(dist.isend, own.contiguous(), group=self._group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self._group, group_peer=peer),
        ]
        for transfer in dist.batch_isend_irecv(transfers):
            transfer.wait()
        own.add_(other)
