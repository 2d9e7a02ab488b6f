"""AdamW, its learning rate, and its state as flat tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from trainer_svc.config import OptimizerConfig

__all__ = ["build_adamw", "learning_rate", "load_optimizer_tensors", "optimizer_tensors"]

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""Keys of AdamW's state per parameter."""


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Learning rate of the step with this index, counted from 0."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / (config.max_steps - config.warmup_steps))
    remaining = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining)


def build_adamw(config: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; matrices decay, vectors (norms, biases) do not."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]]
) -> dict[str, torch.Tensor]:
    """The optimizer's state, named ``<moment>.<parameter>``; views of the live tensors, on their device."""
    return {
        f"{moment}.{name}": optimizer.state[parameter][moment]
        for name, parameter in named
        if parameter in optimizer.state
        for moment in MOMENTS
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, torch.nn.Parameter]],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Replace the optimizer's state by what `optimizer_tensors` gave.

    Raises:
        ValueError: if a tensor belongs to no parameter, is missing or has another shape.
    """
    parameters = dict(named)
    state: dict[torch.nn.Parameter, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        moment, _, name = key.partition(".")
        parameter = parameters.get(name)
        if moment not in MOMENTS or parameter is None:
            raise ValueError(
                f"optimizer tensor {key!r} belongs to no parameter of this model: resume with the model that was saved"
            )
        if moment != "step" and tensor.shape != parameter.shape:
            raise ValueError(
                f"optimizer tensor {key!r} has shape {tuple(tensor.shape)}, expected {tuple(parameter.shape)}"
            )
        state.setdefault(parameter, {})[moment] = tensor.to(parameter.device, torch.float32, copy=True)
    incomplete = [name for name, parameter in parameters.items() if 0 < len(state.get(parameter, {})) < len(MOMENTS)]
    if incomplete:
        raise ValueError(f"the optimizer state of {incomplete[0]!r} is incomplete: use another checkpoint")
    optimizer.state.clear()
    optimizer.state.update(state)
