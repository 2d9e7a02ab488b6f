"""The learning rate of each optimizer step."""

from __future__ import annotations

import math

from trainer_svc.compute_config import OptimizerConfig

__all__ = ["learning_rate", "schedule_factor"]


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Learning rate of the step with this index, counted from 0."""
    return config.lr * schedule_factor(config, step)


def schedule_factor(config: OptimizerConfig, step: int) -> float:
    """Learning rate of the step with this index, counted from 0, as a share of the peak."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            remaining = 1.0 - _progress(config.warmup_steps, config.max_steps, step)
        case "cosine":
            remaining = 0.5 * (1.0 + math.cos(math.pi * _progress(config.warmup_steps, config.max_steps, step)))
        case "wsd":
            begin = max(config.warmup_steps, config.max_steps - config.decay_steps)
            remaining = 1.0 - _progress(begin, config.max_steps, step)
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * remaining


def _progress(begin: int, end: int, step: int) -> float:
    """Share of a decay that lies behind this step: 0 up to `begin`, 1 from `end` on."""
    return min(1.0, max(0.0, (step - begin) / (end - begin)))
