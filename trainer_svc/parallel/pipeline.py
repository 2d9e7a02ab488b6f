"""Pipeline parallelism: each process keeps some layers, and micro-batches pass through the processes.

    stage 0   f0 f1 f2 .. b0 f3 b1 ..        one forward, one backward (1F1B): a stage keeps at most as many
    stage 1      f0 f1 b0 f2 b1 ..           micro-batches as there are stages from it to the last
    stage 2         f0 b0 f1 b1 ..

Micro-batches are packed rows of different lengths. Every stage has the same rows, so each knows the length of what it
receives; the schedules of `torch.distributed.pipelining` want one size for all. Hidden states travel as float32 (float64 for
a float64 model), whatever precision the layers compute in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trainer_svc.parallel.dims import stage_layers

__all__ = ["Absent", "InFlight", "Stage", "cut_stage", "tied_weight"]


class Absent(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Takes the place of a layer that another stage has, so that the layers here keep their names."""

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: Any) -> torch.Tensor:  # noqa: ANN401  what the layer takes
        """Return the hidden states unchanged."""
        return hidden_states


def cut_stage(model: PreTrainedModel, stage: int, stages: int) -> None:
    """Remove what other stages have: the first keeps the embedding, the last keeps norm and heads, each its own layers.

    The last stage of a tied model keeps the embedding too, since it is the weight of its head.

    Args:
        model: A whole model; changed in place.
        stage: This stage, from 0.
        stages: Number of stages.

    Raises:
        ValueError: if the model does not consist of embedding, layers, norm and head.
    """
    body = model.base_model
    parts = ("embed_tokens", "layers", "norm")
    missing = [name for name in parts if not isinstance(getattr(body, name, None), nn.Module)]
    if missing:
        raise ValueError(
            f"{type(model).__name__} has no {missing[0]!r} and cannot be cut into stages: set trainer.parallel.pp to 1"
        )
    own = stage_layers(len(body.layers), stages)[stage]
    for index in range(len(body.layers)):
        if index not in own:
            body.layers[index] = Absent()
    if stage > 0 and not (stage == stages - 1 and _tied(model)):
        body.embed_tokens = None
    if stage < stages - 1:
        body.norm = nn.Identity()
        for name in ("lm_head", "score", "value_head"):
            if isinstance(getattr(model, name, None), nn.Module):
                setattr(model, name, None)


def tied_weight(model: PreTrainedModel, stage: int, stages: int) -> nn.Parameter | None:
    """Return the embedding that the head of a tied model shares, on the first and the last stage, which both hold it."""
    if stages == 1 or stage not in (0, stages - 1) or not _tied(model):
        return None
    return model.base_model.embed_tokens.weight


def _tied(model: PreTrainedModel) -> bool:
    return "lm_head.weight" in model.all_tied_weights_keys


class InFlight(NamedTuple):
    """A micro-batch between its forward and its backward pass on this stage.

    Attributes:
        states: The hidden states that went in; None on the first stage.
        result: The hidden states that came out, or the loss on the last stage.
    """

    states: torch.Tensor | None
    result: torch.Tensor


Forward = Callable[[int, torch.Tensor | None], InFlight]
"""Runs the forward pass of micro-batch number i on the hidden states that came in."""

Backward = Callable[[InFlight, torch.Tensor | None], torch.Tensor | None]
"""Runs the backward pass with the gradient of the result, and returns that of the states."""


class Stage:
    """One process's place in the pipeline, and what it exchanges with the other stages.

    Args:
        group: One process per stage, in order.
        width: Size of a hidden state.
        device: Where this process computes.
        wide: Whether hidden states travel as float64.
    """

    def __init__(self, group: dist.ProcessGroup, width: int, device: torch.device, *, wide: bool) -> None:
        self._group, self._width, self._device = group, width, device
        self._dtype = torch.float64 if wide else torch.float32
        stage, stages = dist.get_rank(group), dist.get_world_size(group)
        self._before = stage - 1 if stage > 0 else None
        self._behind = stage + 1 if stage + 1 < stages else None
        self._ahead = stages - stage - 1

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the outputs."""
        return self._behind is None

    def train(self, tokens: Rows[int], forward: Forward, backward: Backward) -> None:
        """Run the schedule: every stage calls it with the same micro-batches.

        Args:
            tokens: Tokens of each micro-batch whose hidden states are computed here.
            forward: Called once per micro-batch, in order.
            backward: Called once per micro-batch, in order.
        """
        ahead = min(self._ahead, len(tokens))
        in_flight: deque[tuple[int, InFlight]] = deque()
        for number in range(ahead):
            current = forward(number, self._pass(self._before, receive=tokens[number]))
            self._pass(self._behind, send=current.result)
            in_flight.append((number, current))
        steady = range(ahead, len(tokens))
        states = self._pass(self._before, receive=tokens[ahead]) if steady else None
        for number in steady:
            current = forward(number, states)
            in_flight.append((number, current))
            oldest, done = in_flight.popleft()
            gradient = self._pass(self._behind, send=current.result, receive=tokens[oldest])
            following = tokens[number + 1] if number + 1 < len(tokens) else None
            states = self._pass(self._before, send=backward(done, gradient), receive=following)
        for number, done in in_flight:
            self._pass(self._before, send=backward(done, self._pass(self._behind, receive=tokens[number])))

    def receive(self, tokens: int) -> torch.Tensor | None:
        """Return the hidden states of the stage before; None on the first stage."""
        return self._pass(self._before, receive=tokens)

    def send(self, states: torch.Tensor) -> None:
        """Give hidden states to the next stage, if there is one."""
        self._pass(self._behind, send=states)

    def broadcast(self, column: torch.Tensor) -> torch.Tensor:
        """Return the last stage's column on every stage, without its gradient.

        Args:
            column: On the last stage its column, elsewhere memory of the same shape, which may be overwritten.
        """
        shared = column.detach().to(self._dtype).contiguous()
        last = dist.get_global_rank(self._group, dist.get_world_size(self._group) - 1)
        dist.broadcast(shared, src=last, group=self._group)
        return shared

    def add_tied_gradients(self, tied: nn.Parameter) -> None:
        """Add up the gradients of the two copies of a tied weight, so that the copies stay equal.

        Args:
            tied: This stage's copy; only the first and the last stage call this.
        """
        gradient = tied.grad if tied.grad is not None else torch.zeros_like(tied)
        if isinstance(gradient, DTensor):  # an embedding's gradient may be whole although its weight is sharded
            gradient = gradient.redistribute(placements=tied.placements)
        tied.grad = gradient
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        other = torch.empty_like(own)
        peer = dist.get_world_size(self._group) - 1 if self._before is None else 0
        self._transfer([(dist.isend, own.contiguous(), peer), (dist.irecv, other, peer)])
        own.add_(other)

    def _pass(
        self, neighbour: int | None, *, send: torch.Tensor | None = None, receive: int | None = None
    ) -> torch.Tensor | None:
        """Exchange hidden states or their gradients with a neighbour.

        Args:
            neighbour: The other stage; None: there is none, and nothing happens.
            send: What it gets.
            receive: Number of tokens to receive; None: nothing.

        Returns:
            What was received.
        """
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
