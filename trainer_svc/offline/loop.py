"""The loop of offline training, the same for demonstrations, preferences and teachers: batches in, a model directory out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from time import perf_counter
from typing import TypeVar

import torch

from sluice.config import ConfigError
from trainer_svc.compute_config import check_decay
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.step_metrics import StepMetrics
from trainer_svc.offline.examples import Data, Examples, batches, every_row
from trainer_svc.offline.lesson import Lesson
from trainer_svc.offline.progress import Evaluation, Progress, Report, Resumed, Summary
from trainer_svc.offline.resuming import RunCheckpoints, checkpoint_directory
from trainer_svc.offline.settings import OfflineConfig

__all__ = ["step_count", "train", "with_length"]

_Config = TypeVar("_Config", bound=OfflineConfig)


def step_count(config: OfflineConfig, examples: int) -> int:
    """Optimizer steps of a run."""
    return config.max_steps or math.ceil(config.epochs * examples / config.batch_size)


def with_length(config: _Config, examples: int) -> _Config:
    """The settings with the number of steps filled in, at which a decay of the learning rate ends.

    Raises:
        ConfigError: if these steps are too few for the warm-up and the decay.
    """
    steps = step_count(config, examples)
    sized = config.model_copy(update={"max_steps": steps})
    try:
        check_decay(sized)
    except ValueError as error:
        raise ConfigError(
            f"{examples} examples, {config.epochs:g} times over in batches of {config.batch_size}, make {steps} steps: {error}"
        ) from error
    return sized


def train(engine: TrainEngine, lesson: Lesson, data: Data, config: OfflineConfig, report: Report) -> Summary:
    """Train and write the model.

    Args:
        engine: The model.
        lesson: What is minimised.
        data: What to train and to evaluate on.
        config: The settings.
        report: Called every `log_every` steps and with each evaluation, and first of all where a run was to be resumed.

    Raises:
        FileExistsError: if the output directory exists.
    """
    examples, held_out = data.train, data.held_out
    steps = step_count(config, len(examples))
    checkpoints = RunCheckpoints(engine, config)
    first = checkpoints.resume()
    if config.resume:
        report(Resumed(checkpoint_directory(config.output), first))
    tally, evaluations = _Tally(lesson, first, steps), []
    start = perf_counter()
    drawn = batches(examples, config.batch_size, config.seed, engine.ranks, first=first)
    for step, rows in zip(range(first, steps), drawn):  # noqa: B905  batches never end
        if held_out is not None and (step % config.eval_every == 0 if config.eval_every else step == 0):
            evaluations.append(evaluate(engine, lesson, held_out, step))
            report(evaluations[-1])
        tally.add(engine.train_batch(rows, lesson.loss, lesson.weight, whole_groups=lesson.whole_groups))
        if tally.steps % config.log_every == 0 or tally.steps == steps:
            report(tally.progress())
        checkpoints.after(step + 1)
    if held_out is not None:
        evaluations.append(evaluate(engine, lesson, held_out, steps))
        report(evaluations[-1])
    seconds = perf_counter() - start
    engine.export_hf(config.output, getattr(torch, config.save_dtype))
    checkpoints.remove()
    return Summary(
        output=config.output,
        steps=steps,
        examples=len(examples),
        dropped_long=data.dropped_long,
        tokens=tally.tokens,
        learned_tokens=tally.learned_tokens,
        final_loss=tally.final_loss(),
        skipped=tally.skipped,
        train_s=seconds,
        evaluations=tuple(evaluations),
    )


def evaluate(engine: TrainEngine, lesson: Lesson, examples: Examples, step: int) -> Evaluation:
    """The loss of all examples under the current weights.

    Args:
        engine: The model.
        lesson: What is minimised.
        examples: The held-out ones.
        step: Optimizer steps done.
    """
    rows = every_row(examples, engine.ranks)
    metrics = engine.eval_batch(rows, lesson.loss, lesson.weight, whole_groups=lesson.whole_groups)
    return Evaluation(step, metrics.loss, lesson.figures(metrics.sums))


class _Tally:
    """What the steps so far add up to."""

    def __init__(self, lesson: Lesson, first: int, steps: int) -> None:
        self._lesson, self._first, self._planned = lesson, first, steps
        self._losses: list[float] = []
        self._learning_rate = 0.0
        self._sums: Counter[str] = Counter()
        self._reported, self._reported_losses, self._reported_tokens = perf_counter(), 0, 0
        self.tokens = self.learned_tokens = self.skipped = 0

    @property
    def steps(self) -> int:
        return self._first + len(self._losses)

    def add(self, metrics: StepMetrics) -> None:
        self._losses.append(metrics.loss)
        self._learning_rate = metrics.learning_rate
        self._sums.update(_added(metrics.sums))
        self.skipped += metrics.skipped
        self.tokens += metrics.tokens
        self.learned_tokens += metrics.loss_tokens

    def progress(self) -> Progress:
        """The report on the steps since the last one."""
        now = perf_counter()
        recent = self._losses[self._reported_losses :]
        progress = Progress(
            step=self.steps,
            steps=self._planned,
            loss=sum(recent) / len(recent),
            learning_rate=self._learning_rate,
            tokens_per_s=(self.tokens - self._reported_tokens) / (now - self._reported),
            skipped=self.skipped,
            figures=self._lesson.figures(self._sums),
        )
        self._reported, self._reported_losses, self._reported_tokens = now, len(self._losses), self.tokens
        self._sums.clear()
        return progress

    def final_loss(self) -> float:
        last = self._losses[-max(1, len(self._losses) // 10) :]
        return sum(last) / len(last) if last else math.nan


def _added(sums: Mapping[str, float]) -> dict[str, float]:
    """Those that add up over steps."""
    return {name: value for name, value in sums.items() if not name.startswith("max_")}
