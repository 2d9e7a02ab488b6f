"""AdamW, or Muon beside AdamW, behind one interface; and their state as flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from threading import Event
from typing import Any

import structlog
import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from trainer_svc.compute_config import ComputeConfig
from trainer_svc.engine.muon import ShardedMuon
from trainer_svc.engine.offload import OffloadedAdamW
from trainer_svc.engine.schedule import schedule_factor

__all__ = ["Optimizers", "build_optimizers"]

MUON_SCALES = {"rms": "match_rms_adamw", "spectral": "original"}
"""Our names of torch's ways to scale a step."""

HEADS = ("score", "value_head", "lm_head")
"""Modules on top of a model, beside its output embedding: what they predict has few dimensions, so that AdamW fits them."""

log = structlog.get_logger(__name__)


class Optimizers:
    """One optimizer, or two that share the parameters.

    Args:
        config: The settings.
        parts: The optimizers; each parameter belongs to one of them.
    """

    def __init__(self, config: ComputeConfig, parts: Collection[torch.optim.Optimizer]) -> None:
        self.config = config
        self.parts = tuple(parts)

    @property
    def owners(self) -> dict[torch.nn.Parameter, torch.optim.Optimizer]:
        """The optimizer of each parameter."""
        return {each: part for part in self.parts for group in part.param_groups for each in group["params"]}

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def step(self, index: int) -> None:
        """Apply the gradients.

        Args:
            index: Optimizer steps before this one; the learning rates follow from it.
        """
        factor = schedule_factor(self.config, index)
        for part in self.parts:
            peak = self.config.muon_lr or self.config.lr if isinstance(part, torch.optim.Muon) else self.config.lr
            for group in part.param_groups:
                group["lr"] = peak * factor
            part.step()

    def register_step_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have a hook called once per step, before anything changes; torch.optim.Optimizer's method of this name."""
        return self.parts[0].register_step_pre_hook(hook)

    def tensors(self, named: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[str, torch.Tensor]:
        """The state, named ``<moment>.<parameter>``; the live tensors, where they lie."""
        owners = self.owners
        return {
            f"{moment}.{name}": tensor
            for name, parameter in named
            if parameter in owners
            for moment, tensor in owners[parameter].state.get(parameter, {}).items()
        }

    def lend(self, named: Iterable[tuple[str, torch.nn.Parameter]], read: Event) -> set[str]:
        """Leave the state in host memory as it is until `read` is set; return its names, as of `tensors`."""
        names: set[str] = set()
        given = list(named)
        for part in self.parts:
            if isinstance(part, OffloadedAdamW):
                part.lend(read)
                names |= {f"{moment}.{name}" for name, each in given for moment in part.state.get(each, {})}
        return names

    def make_room(
        self, named: Mapping[str, torch.nn.Parameter], shapes: Mapping[str, torch.Size]
    ) -> dict[str, torch.Tensor]:
        """Replace the state by zeros of the names and shapes that `tensors` gave, to be filled.

        Raises:
            ValueError: if a tensor belongs to no parameter or another optimizer, is missing or has another shape; then
                nothing has changed.
        """
        owners, wanted = self.owners, dict[torch.nn.Parameter, list[str]]()
        for key, shape in shapes.items():
            moment, _, name = key.partition(".")
            parameter = named.get(name)
            if parameter is None or parameter not in owners or moment not in _moments(owners[parameter]):
                raise ValueError(
                    f"optimizer tensor {key!r} belongs to no parameter of this model and optimizer: resume with the model and the optimizer that were saved"
                )
            if moment != "step" and shape != parameter.shape:
                raise ValueError(
                    f"optimizer tensor {key!r} has shape {tuple(shape)}, expected {tuple(parameter.shape)}"
                )
            wanted.setdefault(parameter, []).append(moment)
        for name, parameter in named.items():
            if parameter in wanted and len(wanted[parameter]) < len(_moments(owners[parameter])):
                raise ValueError(f"the optimizer state of {name!r} is incomplete: use another checkpoint")
        for part in self.parts:
            part.state.clear()
        for parameter, moments in wanted.items():
            part = owners[parameter]
            part.state[parameter] = {moment: _room(part, parameter, moment) for moment in moments}
        return self.tensors(named.items())


def _moments(part: torch.optim.Optimizer) -> tuple[str, ...]:
    return ("momentum_buffer",) if isinstance(part, torch.optim.Muon) else ("step", "exp_avg", "exp_avg_sq")


def _room(part: torch.optim.Optimizer, parameter: torch.nn.Parameter, moment: str) -> torch.Tensor:
    offloaded = isinstance(part, OffloadedAdamW)
    if moment == "step":
        return torch.zeros((), device="cpu" if offloaded else parameter.device)
    return part.empty_moment(parameter) if offloaded else torch.zeros_like(parameter, requires_grad=False)


def build_optimizers(config: ComputeConfig, model: PreTrainedModel, device: torch.device) -> Optimizers:
    """The optimizers of a model's trainable parameters; matrices decay, vectors (norms, biases) do not.

    Args:
        config: The settings.
        model: The model, cut over processes already.
        device: Where it computes.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hidden = _hidden_matrices(model) if config.optimizer == "muon" else set()
    parts: list[torch.optim.Optimizer] = []
    if matrices := [each for each in trainable if each in hidden]:
        parts.append(
            ShardedMuon(
                matrices,
                lr=config.muon_lr or config.lr,
                weight_decay=config.weight_decay,
                momentum=config.muon_momentum,
                adjust_lr_fn=MUON_SCALES[config.muon_scale],
            )
        )
    if others := [each for each in trainable if each not in hidden]:
        parts.append(_adamw(config, others, device))
    return Optimizers(config, parts)


def _adamw(
    config: ComputeConfig, parameters: Iterable[torch.nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    groups: dict[object, dict[str, Any]] = {}
    for each in parameters:
        # Fused kernels take tensors of one layout at a time.
        mesh = each.device_mesh if isinstance(each, DTensor) else None
        decay = config.weight_decay if each.ndim >= 2 else 0.0
        groups.setdefault((mesh, each.ndim >= 2), {"params": [], "weight_decay": decay})["params"].append(each)
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.optimizer_offload and device.type == "cpu":
        log.warning("optimizer_offload changes nothing: the model is in the host's memory already")
    elif config.optimizer_offload:
        return OffloadedAdamW(list(groups.values()), **options)
    return torch.optim.AdamW(list(groups.values()), **options, fused=True)


def _hidden_matrices(model: PreTrainedModel) -> set[torch.nn.Parameter]:
    """Matrices that turn hidden states into hidden states: no embedding, no head."""
    outside = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    outside += [model.get_output_embeddings(), *(getattr(model, name, None) for name in HEADS)]
    excluded = {each for module in outside if module is not None for each in module.parameters()}
    return {each for each in model.parameters() if each.ndim == 2 and each not in excluded}
