"""Offline training: each of its four kinds, from the settings to a model directory, and what it reports on the way."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TypeAlias, TypeVar

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from sluice.config import ConfigError, reason_of
from sluice.render import ChatRenderer
from trainer_svc.compute_config import LoraConfig, check_decay
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.metrics import StepMetrics
from trainer_svc.engine.network import Head
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import Objective
from trainer_svc.offline.checkpoints import RunCheckpoints, checkpoint_directory, claim_output
from trainer_svc.offline.config import DataError, DistillConfig, DpoConfig, OfflineConfig, RewardModelConfig, SftConfig
from trainer_svc.offline.data import (
    Data,
    Examples,
    batches,
    every_row,
    load_data,
    precompute_logprobs,
    render_demonstration,
    render_pair,
    scored,
)
from trainer_svc.offline.losses import (
    PreferenceLoss,
    ScoreLoss,
    TeacherLoss,
    Training,
    count_pairs,
    preference_figures,
    score_figures,
    teacher_figures,
)
from trainer_svc.parallel.mesh import SINGLE, Mesh

_Config = TypeVar("_Config", bound=OfflineConfig)


def run(config: OfflineConfig, report: Report, mesh: Mesh = SINGLE) -> Summary:
    """Train and write the model.

    Args:
        config: The settings; their class says which kind of training it is.
        report: Called every `log_every` steps, with each evaluation of held-out examples, and first if the run is to be resumed.
        mesh: The processes that train together.

    Raises:
        FinishedError: if the run is to be resumed and has finished.
        FileExistsError: if the output directory exists; nothing is trained then.
        DataError: if the examples cannot be used.
        ConfigError: if the model does not load, or the settings do not fit.
    """
    claim_output(config)
    renderer = ChatRenderer(_tokenizer_of(config.model, "model"))
    match config:
        case SftConfig():
            return _fine_tune(config, renderer, report, mesh)
        case DpoConfig():
            return _prefer(config, renderer, report, mesh)
        case RewardModelConfig():
            return _train_scorer(config, renderer, report, mesh)
        case DistillConfig():
            return _distill(config, renderer, report, mesh)
    raise TypeError(f"there is no offline training for {type(config).__name__}")


def _fine_tune(config: SftConfig, renderer: ChatRenderer, report: Report, mesh: Mesh) -> Summary:
    data = load_data(config, partial(render_demonstration, renderer))
    engine = _build_engine(with_steps(config, len(data.train)), mesh)
    objective = Objective.of(ObjectiveConfig(preset="sft"))
    return _train(engine, Training(objective.loss, objective.weight), data, config, report)


def _prefer(config: DpoConfig, renderer: ChatRenderer, report: Report, mesh: Mesh) -> Summary:
    data = load_data(config, partial(render_pair, renderer))
    engine = _build_engine(with_steps(config, len(data.train)), mesh)
    data = data.each(lambda examples: precompute_logprobs(engine, examples, "reference_logprobs"))
    training = Training(PreferenceLoss(config), count_pairs, preference_figures, whole_groups=True)
    return _train(engine, training, data, config, report)


def _train_scorer(config: RewardModelConfig, renderer: ChatRenderer, report: Report, mesh: Mesh) -> Summary:
    """Train a sequence classifier with one label."""
    padding = AutoConfig.from_pretrained(config.model).get_text_config().pad_token_id
    if padding is None:
        padding = renderer.tokenizer.pad_token_id
    data = load_data(config, partial(render_pair, renderer)).each(lambda pairs: scored(pairs, padding))
    engine = _build_engine(with_steps(config, len(data.train)), mesh, head="value")
    # transformers finds the last token of a padded batch by it, and refuses batches where it is not set.
    engine.network.model.config.get_text_config().pad_token_id = padding
    training = Training(ScoreLoss(config.centering), count_pairs, score_figures, whole_groups=True)
    return _train(engine, training, data, config, report)


def _distill(config: DistillConfig, renderer: ChatRenderer, report: Report, mesh: Mesh) -> Summary:
    if _tokenizer_of(config.teacher, "teacher").get_vocab() != renderer.tokenizer.get_vocab():
        raise DataError(
            f"the teacher {config.teacher} has another vocabulary than {config.model}: choose models with one tokenizer"
        )
    data = load_data(config, partial(render_demonstration, renderer))
    sized = with_steps(config, len(data.train))
    data = _with_teacher(sized, data, mesh)
    loss = TeacherLoss(config.divergence)
    training = Training(loss, loss.objective.weight, teacher_figures)
    return _train(_build_engine(sized, mesh), training, data, config, report)


def _with_teacher(config: DistillConfig, data: Data, mesh: Mesh) -> Data:
    """Return the data with the teacher's log-probabilities. The teacher's memory is free when this returns."""
    teacher = _build_engine(config.model_copy(update={"lora": LoraConfig()}), mesh, config.teacher)
    return data.each(lambda examples: precompute_logprobs(teacher, examples, "teacher_logprobs"))


def _tokenizer_of(model: str, setting: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model.

    Args:
        model: A directory or hub id.
        setting: The setting that names it, for the message.

    Raises:
        ConfigError: if it has none that loads.
    """
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting}: no tokenizer loads from {model}: {reason_of(error)}; give a model directory or a hub id that has one"
        ) from error


def _build_engine(
    config: OfflineConfig, mesh: Mesh, frozen_model: str | None = None, *, head: Head = "language"
) -> TrainEngine:
    """Load the engine of this process.

    Args:
        config: The settings, with the number of steps filled in.
        mesh: The processes that train together.
        frozen_model: Directory or hub id of a model that only computes; None: the model to train.
        head: Head of the network.

    Raises:
        ConfigError: if the model does not load, or the settings do not fit it, the device or the processes.
    """
    model = frozen_model or config.model
    try:
        return TrainEngine(config, model, config.seed, head=head, mesh=mesh, frozen="auto" if frozen_model else None)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot load the model {model}: {reason_of(error)}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except RuntimeError as error:
        if "mismatched_sizes" not in str(error):
            raise
        raise ConfigError(
            f"cannot load the model {model}: its weights have other shapes than its config.json says: give the"
            " directory of a whole model"
        ) from error


# The loop.


def with_steps(config: _Config, examples: int) -> _Config:
    """Return the settings with the number of optimizer steps filled in; a decay of the learning rate ends there.

    Raises:
        ConfigError: if these steps are too few for the warm-up and the decay.
    """
    steps = config.max_steps or math.ceil(config.epochs * examples / config.batch_size)
    sized = config.model_copy(update={"max_steps": steps})
    try:
        check_decay(sized)
    except ValueError as error:
        raise ConfigError(
            f"{examples} examples, {config.epochs:g} times over in batches of {config.batch_size}, make {steps} steps: {error}"
        ) from error
    return sized


def _train(engine: TrainEngine, training: Training, data: Data, config: OfflineConfig, report: Report) -> Summary:
    """Make all optimizer steps of a run, and write the model."""
    examples, held_out = data.train, data.held_out
    steps = with_steps(config, len(examples)).max_steps
    checkpoints = RunCheckpoints(engine, config)
    first = checkpoints.resume()
    if config.resume:
        report(Resumed(checkpoint_directory(config.output), first))
    tally, evaluations = _Tally(training, first, steps), []
    start = perf_counter()
    drawn = batches(examples, config.batch_size, config.seed, engine.ranks, first=first)
    for step, rows in zip(range(first, steps), drawn):  # noqa: B905  batches never end
        if held_out is not None and (step % config.eval_every == 0 if config.eval_every else step == 0):
            evaluations.append(_evaluate(engine, training, held_out, step))
            report(evaluations[-1])
        tally.add(engine.train_batch(rows, training.loss, training.weight, whole_groups=training.whole_groups))
        if tally.steps % config.log_every == 0 or tally.steps == steps:
            report(tally.progress())
        checkpoints.after(step + 1)
    if held_out is not None:
        evaluations.append(_evaluate(engine, training, held_out, steps))
        report(evaluations[-1])
    seconds = perf_counter() - start
    checkpoints.before_export()
    engine.export_hf(config.output, getattr(torch, config.save_dtype))
    checkpoints.remove()
    return Summary(
        output=config.output,
        steps=steps,
        examples=len(examples),
        dropped_long=examples.dropped_long,
        tokens=tally.tokens,
        learned_tokens=tally.learned_tokens,
        final_loss=tally.final_loss(),
        skipped=tally.skipped,
        train_s=seconds,
        evaluations=tuple(evaluations),
    )


def _evaluate(engine: TrainEngine, training: Training, examples: Examples, step: int) -> Evaluation:
    """Return the loss of all examples under the current weights, after `step` optimizer steps."""
    rows = every_row(examples, engine.ranks)
    metrics = engine.eval_batch(rows, training.loss, training.weight, whole_groups=training.whole_groups)
    return Evaluation(step, metrics.loss, training.figures(metrics.sums))


class _Tally:
    """Running totals of the steps so far."""

    def __init__(self, training: Training, first: int, steps: int) -> None:
        self._training, self._first, self._planned = training, first, steps
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
        """Return the report on the steps since the last report."""
        now = perf_counter()
        recent = self._losses[self._reported_losses :]
        progress = Progress(
            step=self.steps,
            steps=self._planned,
            loss=sum(recent) / len(recent),
            learning_rate=self._learning_rate,
            tokens_per_s=(self.tokens - self._reported_tokens) / (now - self._reported),
            skipped=self.skipped,
            figures=self._training.figures(self._sums),
        )
        self._reported, self._reported_losses, self._reported_tokens = now, len(self._losses), self.tokens
        self._sums.clear()
        return progress

    def final_loss(self) -> float:
        last = self._losses[-max(1, len(self._losses) // 10) :]
        return sum(last) / len(last) if last else math.nan


def _added(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the sums that add up over steps; maxima do not."""
    return {name: value for name, value in sums.items() if not name.startswith("max_")}


# What is reported.


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run.

    Attributes:
        step: Optimizer steps done.
        steps: Optimizer steps in all.
        loss: Mean loss since the last report.
        learning_rate: Of the last step.
        tokens_per_s: Tokens of the data per second since the last report, prompts included.
        skipped: Steps so far that were skipped as not finite.
        figures: Other means since the last report, by name.
    """

    step: int
    steps: int
    loss: float
    learning_rate: float
    tokens_per_s: float
    skipped: int
    figures: Mapping[str, float]

    def __str__(self) -> str:
        """Return the line of progress."""
        skipped = f"  skipped {self.skipped}" if self.skipped else ""
        return (
            f"step {self.step:>{len(str(self.steps))}}/{self.steps}  loss {self.loss:.4f}{_written(self.figures)}  "
            f"lr {self.learning_rate:.2e}  {self.tokens_per_s:,.0f} tokens/s{skipped}"
        )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Loss of the held-out examples after a step.

    Attributes:
        step: Optimizer steps done.
        loss: The loss over all held-out examples.
        figures: Other means, by name.
    """

    step: int
    loss: float
    figures: Mapping[str, float]

    def __str__(self) -> str:
        """Return the line of an evaluation."""
        return f"held out after {self.step} steps: loss {self.loss:.4f}{_written(self.figures)}"


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a resumed run begins.

    Attributes:
        directory: The directory of its checkpoints.
        step: Optimizer steps that are done; 0 if there is no checkpoint.
    """

    directory: Path
    step: int

    def __str__(self) -> str:
        """Return the first line."""
        if not self.step:
            return f"there is no checkpoint in {self.directory}: training starts from the beginning"
        return f"resumed from {self.directory} after {self.step} steps"


Report: TypeAlias = Callable[[Progress | Evaluation | Resumed], None]
"""Called every `log_every` steps, with each evaluation, and at the start of a run that is to be resumed."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of a finished run.

    Attributes:
        output: The model directory.
        steps: Optimizer steps.
        examples: Examples that were trained on.
        dropped_long: Examples that were dropped as too long.
        tokens: Tokens trained on, prompts included.
        learned_tokens: Tokens that entered the loss.
        final_loss: Mean loss of the last tenth of the steps that this process made; NaN if it made none.
        skipped: Steps that were skipped as not finite.
        train_s: Seconds of training, evaluations included.
        evaluations: The held-out examples before, during and after training; empty where none are held out.
    """

    output: Path
    steps: int
    examples: int
    dropped_long: int
    tokens: int
    learned_tokens: int
    final_loss: float
    skipped: int
    train_s: float
    evaluations: tuple[Evaluation, ...]

    def line(self, what: str) -> str:
        """Return the last line.

        Args:
            what: The word for the examples, in the plural.
        """
        dropped = f" ({self.dropped_long} more were too long)" if self.dropped_long else ""
        return (
            f"{self.output}: {self.steps} steps on {self.examples} {what}{dropped}, "
            f"{self.tokens:,} tokens ({self.learned_tokens:,} learned) in {self.train_s:.1f} s = "
            f"{self.tokens / self.train_s:,.0f} tokens/s, final loss {self.final_loss:.4f}"
        )


def _written(figures: Mapping[str, float]) -> str:
    return "".join(f"  {name} {value:.4f}" for name, value in figures.items())
