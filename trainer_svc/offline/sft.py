"""Supervised fine-tuning on the training engine: demonstrations in, a Hugging Face model directory out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch
from transformers import AutoTokenizer

from sluice.render import ChatRenderer
from trainer_svc.config import ObjectiveConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.objectives.objective import Objective
from trainer_svc.offline.demonstrations import Demonstrations
from trainer_svc.offline.sft_config import SftConfig

__all__ = ["SftProgress", "SftSummary", "fine_tune"]


@dataclass(frozen=True, slots=True)
class SftProgress:
    """Where a run stands.

    Attributes:
        step: Optimizer steps done.
        steps: Optimizer steps in all.
        loss: Mean loss since the last report, in nats per learned token.
        learning_rate: Of the last step.
        tokens_per_s: Tokens of the data per second since the last report, prompts included.
        skipped: Steps so far that were not finite and changed nothing.
    """

    step: int
    steps: int
    loss: float
    learning_rate: float
    tokens_per_s: float
    skipped: int


@dataclass(frozen=True, slots=True)
class SftSummary:
    """What a run did.

    Attributes:
        output: The model directory.
        steps: Optimizer steps.
        demonstrations: Demonstrations in the data.
        dropped_long: Demonstrations left out as too long.
        tokens: Tokens trained on, prompts included.
        learned_tokens: Those among them that entered the loss.
        final_loss: Mean loss of the last tenth of the steps, in nats per learned token.
        skipped: Steps that were not finite and changed nothing.
        train_s: Seconds of training.
    """

    output: Path
    steps: int
    demonstrations: int
    dropped_long: int
    tokens: int
    learned_tokens: int
    final_loss: float
    skipped: int
    train_s: float


def fine_tune(config: SftConfig, report: Callable[[SftProgress], None]) -> SftSummary:
    """Train and write the model.

    Args:
        config: The settings.
        report: Called every `log_every` steps.

    Raises:
        FileExistsError: if the output directory exists; nothing is trained then.
        DataError: if the demonstrations cannot be used.
    """
    if config.output.exists():
        raise FileExistsError(f"{config.output} exists: remove it or set output to another directory")
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(config.model))
    drop_long = config.on_long == "drop"
    data = Demonstrations.load(config.data, config.split, renderer, max_length=config.max_length, drop_long=drop_long)
    steps = config.max_steps or math.ceil(config.epochs * len(data) / config.batch_size)
    settings = config.model_copy(update={"max_steps": max(steps, config.warmup_steps + 1)})
    engine = TrainEngine(settings, config.model, config.seed)
    objective = Objective.of(ObjectiveConfig(preset="sft"))
    losses: list[float] = []
    tokens = learned = reported_tokens = skipped = 0
    start = reported = perf_counter()
    for step, batch in zip(range(1, steps + 1), data.batches(config.batch_size, config.seed), strict=False):
        metrics = engine.train_batch(batch, objective.loss, objective.weight, entropy="measure")
        losses.append(metrics.loss)
        skipped += metrics.skipped
        tokens += metrics.tokens
        learned += metrics.loss_tokens
        if step % config.log_every == 0 or step == steps:
            now = perf_counter()
            recent = losses[(step - 1) // config.log_every * config.log_every :]
            rate = (tokens - reported_tokens) / (now - reported)
            report(SftProgress(step, steps, sum(recent) / len(recent), metrics.learning_rate, rate, skipped))
            reported, reported_tokens = now, tokens
    seconds = perf_counter() - start
    engine.export_hf(config.output, getattr(torch, config.save_dtype))
    last = losses[-max(1, steps // 10) :]
    final = sum(last) / len(last)
    return SftSummary(config.output, steps, len(data), data.dropped_long, tokens, learned, final, skipped, seconds)
