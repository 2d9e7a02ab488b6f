"""Several adapters in one engine: each has its own factors, moments and gradient, and is put into the engine while it is used.

Nothing is copied: the parameters of the engine point to the tensors of the adapter. A training computes the same numbers whatever
other trainings do in between.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from trainer_svc.batch.rows import TrainingRow
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.finite import UnfitWeightsError, some_of, unfit_weights
from trainer_svc.engine.metrics import StepRecord
from trainer_svc.objectives.objective import (
    Objective,
    check_columns,
    finish,
    keep_trainable,
    with_group_tokens,
    with_selection,
)

FACTORS, MOMENTS = "factors.", "moments."
"""Prefixes of the tensors in a saved state."""

FORMAT = "1"
"""Format version of a saved state, which is a safetensors file whose metadata has digest and steps."""


class StateError(ValueError):
    """A saved state is damaged or belongs to other settings."""


@dataclass
class AdapterState:
    """One adapter in training.

    Attributes:
        factors: The factors, by the names of the engine's parameters.
        moments: AdamW's state by parameter; empty before the first step.
        gradients: The gradients added since the last optimizer step; None if there are none.
        optimizer_steps: Number of applied optimizer steps.
        changes: Number of times that the factors have changed.
    """

    factors: dict[str, torch.Tensor]
    moments: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] | None = None
    optimizer_steps: int = 0
    changes: int = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of a saved state. The gradient is not among them."""
        found = {f"{FACTORS}{name}": tensor for name, tensor in self.factors.items()}
        for name, moments in self.moments.items():
            found |= {f"{MOMENTS}{moment}.{name}": tensor for moment, tensor in moments.items()}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(found.items())}

    def require_fit(self) -> None:
        """Raise if the factors must be neither written nor published.

        Raises:
            UnfitWeightsError: if they are not finite, or too large to compute with.
        """
        if names := unfit_weights(self.factors.items()):
            raise UnfitWeightsError(
                f"steps made factors that are not finite, or too large to compute with: {some_of(names)}; load a saved state, and"
                " continue with a lower learning rate"
            )

    def digest(self) -> str:
        """Return the xxh3-128 digest, in hexadecimal, of names and bytes of all tensors of a saved state."""
        total = xxhash.xxh3_128()
        for name, tensor in self.tensors().items():
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return str(total.hexdigest())


@dataclass(frozen=True, slots=True)
class Gradient:
    """The result of an operation that added a gradient.

    Attributes:
        loss: The summed loss divided by the divisor.
        divisor: The divisor of the summed loss.
        tokens: Number of trained tokens.
        metrics: Metrics of the objective, by name.
    """

    loss: float
    divisor: float
    tokens: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Step:
    """An optimizer step: the 2-norm of its gradient before clipping, and whether it was skipped as not finite."""

    grad_norm: float
    skipped: bool


class NoGradientError(ValueError):
    """There is nothing to apply."""


class AdapterBank:
    """Trains adapters in one engine, which has exactly one LoRA adapter. Not thread-safe.

    Args:
        engine: The engine. The factors that it has initially belong to no training.
    """

    def __init__(self, engine: TrainEngine) -> None:
        if engine.adapter is None:
            raise ValueError("the engine has no adapter: set lora.rank")
        self.engine, self.adapter = engine, engine.adapter
        self._parameters = {name: each for name, each in engine.network.model.named_parameters() if each.requires_grad}
        self._owners = engine.optimizer.owners

    def create(self, seed: int) -> AdapterState:
        """Return a new adapter, which changes no output of the base model.

        Args:
            seed: Decides the values of the factors A, drawn as PEFT draws them; B is zero.
        """
        generator = torch.Generator().manual_seed(seed)
        factors: dict[str, torch.Tensor] = {}
        for name, parameter in self._parameters.items():
            factor = torch.zeros(parameter.shape, dtype=parameter.dtype)
            if ".lora_A." in name:
                torch.nn.init.kaiming_uniform_(factor, a=math.sqrt(5), generator=generator)
            factors[name] = factor.to(parameter.device)
        return AdapterState(factors)

    @contextmanager
    def using(self, state: AdapterState) -> Iterator[None]:
        """Put an adapter into the engine while the block runs."""
        for name, parameter in self._parameters.items():
            parameter.data = state.factors[name]
            parameter.grad = None if state.gradients is None else state.gradients[name]
            moments = self._owners[parameter].state
            moments.pop(parameter, None)
            if name in state.moments:
                moments[parameter] = state.moments[name]
        self.engine.optimizer_steps = state.optimizer_steps
        try:
            yield
        finally:
            gradients = {name: each.grad for name, each in self._parameters.items() if each.grad is not None}
            state.gradients = (
                {name: gradients.get(name, torch.zeros_like(each)) for name, each in self._parameters.items()}
                if gradients
                else None
            )
            state.moments = {
                name: self._owners[each].state.pop(each)
                for name, each in self._parameters.items()
                if each in self._owners[each].state
            }
            state.optimizer_steps = self.engine.optimizer_steps
            for parameter in self._parameters.values():
                parameter.grad = None

    def add_gradient(
        self, state: AdapterState, rows: Sequence[TrainingRow], objective: Objective, divisor: float | None
    ) -> Gradient:
        """Add the gradient of the loss of these rows to the gradient of an adapter.

        Args:
            state: The adapter.
            rows: The rows to train on.
            objective: The loss.
            divisor: Divisor of the summed loss; None: the objective's own divisor for these rows.

        Raises:
            ValueError: if the rows cannot be trained. A part of their gradient may have been added.
        """
        settings = objective.resolved
        check_columns(rows, settings)
        kept, dropped = keep_trainable(rows, settings)
        kept = with_group_tokens(kept)
        if settings.selects_tokens:
            kept = with_selection(kept, settings)
        weight = objective.weight(kept) if divisor is None else divisor
        record = StepRecord(kept, meter=self.engine.meter)
        with self.using(state):
            self.engine.add_gradients(
                record,
                kept,
                objective.loss,
                lambda _: weight,
                contributes=objective.contributes,
                entropy=objective.entropy,
            )
        if state.gradients is None:  # no token contributed, for example if all rewards of a group are equal
            state.gradients = {name: torch.zeros_like(each) for name, each in state.factors.items()}
        metrics = record.finish()
        found = {name: float(value) for name, value in finish(metrics.sums).items() if math.isfinite(value)}
        found |= {f"dropped/{name}": float(count) for name, count in dropped.items()}
        return Gradient(metrics.loss, weight or 1.0, metrics.loss_tokens, found)

    def step(self, state: AdapterState, learning_rate: float, *, whole: bool = True) -> Step:
        """Apply the gradient of an adapter, then drop it. If it is not `whole`, drop it without applying it.

        Raises:
            NoGradientError: if there is no gradient, or it is not whole.
        """
        if state.gradients is None or not whole:
            state.gradients = None
            raise NoGradientError(
                "there is no gradient: send a ForwardBackward before the OptimStep"
                if whole
                else "a ForwardBackward since the last step has failed: its gradient is missing, so all were dropped; send them again"
            )
        self.engine.optimizer.changed_lr = learning_rate
        record = StepRecord([])
        with self.using(state):
            self.engine.step(record)
            self.engine.optimizer.zero_grad(set_to_none=True)
        metrics = record.finish()
        state.changes += not metrics.skipped
        return Step(metrics.grad_norm, metrics.skipped)

    def published(self, state: AdapterState) -> dict[str, torch.Tensor]:
        """Return copies of the factors under the names of PEFT's files, in the precision in which they are trained.

        Raises:
            UnfitWeightsError: if they are not finite.
        """
        state.require_fit()
        with self.using(state):
            return {name: tensor.clone() for name, tensor in self.adapter.tensors().items()}


def save_state(state: AdapterState, path: Path) -> str:
    """Write an adapter with its optimizer to a file, replacing an existing one; return the digest.

    Raises:
        OSError: if writing fails; the file is unchanged then.
        UnfitWeightsError: if the factors are not finite; the file is unchanged then.
    """
    state.require_fit()
    digest = state.digest()
    facts = {"format": FORMAT, "digest": digest, "optimizer_steps": str(state.optimizer_steps)}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    with temporary.open("wb") as file:
        file.write(save(state.tensors(), facts))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return digest


def load_state(path: Path, like: AdapterState) -> tuple[AdapterState, str]:
    """Return the adapter that a file holds, and its digest.

    Args:
        path: A file that `save_state` wrote.
        like: An adapter of the same engine.

    Raises:
        FileNotFoundError: if there is no such file.
        StateError: if the file is damaged, or belongs to another model or LoRA rank.
    """
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        digest, steps = facts["digest"], int(facts["optimizer_steps"])
    except (SafetensorError, ValueError, KeyError) as error:
        raise StateError(f"the state cannot be read ({error}): load another one") from error
    loaded = AdapterState({}, optimizer_steps=steps, changes=like.changes + 1)
    for name, tensor in tensors.items():
        if name.startswith(FACTORS):
            loaded.factors[name.removeprefix(FACTORS)] = tensor
        else:
            moment, _, parameter = name.removeprefix(MOMENTS).partition(".")
            loaded.moments.setdefault(parameter, {})[moment] = tensor
    if loaded.digest() != digest:
        raise StateError("the tensors do not have the digest that was written beside them: load another state")
    shapes = {name: tensor.shape for name, tensor in like.factors.items()}
    if {name: tensor.shape for name, tensor in loaded.factors.items()} != shapes:
        raise StateError("the state belongs to another base model or rank: start the service with that of the state")
    for name, factor in like.factors.items():
        loaded.factors[name] = loaded.factors[name].to(factor.device, factor.dtype)
        for moment, tensor in loaded.moments.get(name, {}).items():
            if moment != "step":
                loaded.moments[name][moment] = tensor.to(factor.device)
    return loaded, digest
