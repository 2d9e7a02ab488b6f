"""The four kinds of offline training, from the settings to a model directory, with the progress that they report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TypeAlias, TypeVar

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from sluice.chat_template import set_chat_template, template_text
from sluice.end_tokens import EndTokens, find_padding, read_end_tokens
from sluice.environments.datasets import Row
from sluice.errors import ConfigError, reason_of
from sluice.progress import doing
from sluice.render import ChatRenderer, Rendered
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.compute_config import LoraConfig, check_decay
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.metrics import StepMetrics
from trainer_svc.engine.network import Head
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import Objective
from trainer_svc.offline.checkpoints import RunCheckpoints, checkpoint_directory, claim_output
from trainer_svc.offline.config import DistillConfig, DpoConfig, OfflineConfig, RewardModelConfig, SftConfig
from trainer_svc.offline.data import (
    ASSISTANT,
    Data,
    Render,
    batches,
    every_row,
    load_data,
    precompute_logprobs,
    render_demonstration,
    render_pair,
    roles_of,
    scored,
)
from trainer_svc.offline.evaluations import Evaluations
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

Say: TypeAlias = Callable[[str], None]
"""Takes a line of output: every `log_every` steps, for each evaluation, at the end, and at the start of a resumed run."""


def run(config: OfflineConfig, say: Say, mesh: Mesh = SINGLE) -> None:
    """Train and write the model. The class of the settings says which kind of training it is.

    Raises:
        FinishedError: if the run is to be resumed and has finished.
        FileExistsError: if the output directory exists; nothing is trained then.
        ConfigError: if the examples cannot be used, the model does not load, the settings do not fit, or training makes
            weights that are not finite: nothing is written then.
    """
    claim_output(config)
    renderer = _renderer_of(config)
    match config:
        case SftConfig():
            _fine_tune(config, renderer, say, mesh)
        case DpoConfig():
            _prefer(config, renderer, say, mesh)
        case RewardModelConfig():
            _train_scorer(config, renderer, say, mesh)
        case DistillConfig():
            _distill(config, renderer, say, mesh)
        case _:
            raise TypeError(f"there is no offline training for {type(config).__name__}")


def _fine_tune(config: SftConfig, renderer: ChatRenderer, say: Say, mesh: Mesh) -> None:
    seen: set[str] = set()
    data = load_data(config, _learning(config, renderer, seen))
    if missing := [role for role in config.learn_roles if role not in seen | ASSISTANT]:
        raise ConfigError(
            f"learn_roles names {', '.join(missing)}, and no message has that role: the data has {', '.join(sorted(seen)) or 'no messages'};"
            " correct the name, or leave it out"
        )
    engine = _build_engine(with_steps(config, len(data.train)), mesh)
    _write_ends(engine, renderer.ends)
    objective = Objective.of(ObjectiveConfig(preset="sft"))
    _train(engine, Training(objective.loss, objective.weight), data, config, say)


def _learning(config: SftConfig, renderer: ChatRenderer, seen: set[str]) -> Render:
    """Return a function that renders a demonstration and adds the roles of its messages to `seen`."""

    def render(row: Row) -> Sequence[tuple[Rendered, ...]]:
        examples = render_demonstration(renderer, row, config.learn_roles)
        seen.update(roles_of(row))
        return examples

    return render


def _prefer(config: DpoConfig, renderer: ChatRenderer, say: Say, mesh: Mesh) -> None:
    data = load_data(config, partial(render_pair, renderer))
    engine = _build_engine(with_steps(config, len(data.train)), mesh)
    _write_ends(engine, renderer.ends)
    data = data.each(lambda examples: precompute_logprobs(engine, examples, "reference_logprobs"))
    training = Training(PreferenceLoss(config), count_pairs, preference_figures, whole_groups=True)
    _train(engine, training, data, config, say)


def _train_scorer(config: RewardModelConfig, renderer: ChatRenderer, say: Say, mesh: Mesh) -> None:
    """Train a sequence classifier with one label."""
    found = find_padding(renderer.tokenizer, AutoConfig.from_pretrained(config.model).get_text_config())
    padding = None if found is None else found[0]
    data = load_data(config, partial(render_pair, renderer)).each(lambda pairs: scored(pairs, padding))
    engine = _build_engine(with_steps(config, len(data.train)), mesh, head="value")
    # transformers uses it to find the last token of each sequence in a padded batch, and refuses batches if it is not set.
    engine.network.model.config.get_text_config().pad_token_id = padding
    training = Training(ScoreLoss(config.centering), count_pairs, score_figures, whole_groups=True)
    _train(engine, training, data, config, say)


def _distill(config: DistillConfig, renderer: ChatRenderer, say: Say, mesh: Mesh) -> None:
    if _tokenizer_of(config.teacher, "teacher").get_vocab() != renderer.tokenizer.get_vocab():
        raise ConfigError(
            f"the teacher {config.teacher} has another vocabulary than {config.model}: choose models with one tokenizer"
        )
    data = load_data(config, partial(render_demonstration, renderer))
    sized = with_steps(config, len(data.train))
    data = _with_teacher(sized, data, mesh)
    loss = TeacherLoss(config.divergence)
    training = Training(loss, loss.objective.weight, teacher_figures)
    engine = _build_engine(sized, mesh)
    _write_ends(engine, renderer.ends)
    _train(engine, training, data, config, say)


def _with_teacher(config: DistillConfig, data: Data, mesh: Mesh) -> Data:
    """Return the data with the teacher's log-probabilities. The teacher's memory is free when this returns."""
    teacher = _build_engine(config.model_copy(update={"lora": LoraConfig()}), mesh, config.teacher)
    return data.each(lambda examples: precompute_logprobs(teacher, examples, "teacher_logprobs"))


def _renderer_of(config: OfflineConfig) -> ChatRenderer:
    """Return the renderer of a model, with all tokens that end its turns.

    Raises:
        ConfigError: if the model has no tokenizer or no configuration that loads, or the chat template or its arguments do not fit.
    """
    model, arguments = config.model, config.chat_template_kwargs
    tokenizer = set_chat_template(_tokenizer_of(model, "model"), template_text(config.chat_template), arguments)
    try:
        ends = read_end_tokens(model, tokenizer, arguments)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model: no configuration loads from {model}: {reason_of(error)}") from error
    return ChatRenderer(tokenizer, arguments, ends)


def _tokenizer_of(model: str, setting: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model.

    Raises:
        ConfigError: if no tokenizer loads; the message has the setting that names the model.
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
    """Load an engine in this process: for the model to train, or for a model that only computes.

    Raises:
        ConfigError: if the model does not load, or the settings do not fit it, the device or the processes.
    """
    model = frozen_model or config.model
    try:
        with doing(f"load {model}"):
            return TrainEngine(
                config,
                model,
                config.seed,
                head=head,
                mesh=mesh,
                frozen="auto" if frozen_model else None,
                chat_template=template_text(config.chat_template),
            )
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


def _write_ends(engine: TrainEngine, ends: EndTokens) -> None:
    """Set all tokens that end a turn in the generation configuration to write, because other programs stop only at those."""
    generation_config = engine.network.model.generation_config
    if ends.ids and generation_config is not None:
        generation_config.eos_token_id = list(ends.ids) if len(ends.ids) > 1 else ends.ids[0]


# The loop.


def with_steps(config: _Config, examples: int) -> _Config:
    """Return the settings with the number of optimizer steps filled in. A decay of the learning rate ends at that step.

    Raises:
        ConfigError: if there are too few steps for the warm-up and the decay.
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


def _resume(checkpoints: RunCheckpoints, config: OfflineConfig, say: Say) -> int:
    """Restore the newest checkpoint if the run resumes, and say so; return the number of steps that are done."""
    first = checkpoints.resume()
    if config.resume:
        directory = checkpoint_directory(config.output)
        none = f"there is no checkpoint in {directory}: training starts from the beginning"
        say(f"resumed from {directory} after {first} steps" if first else none)
    return first


def _train(engine: TrainEngine, training: Training, data: Data, config: OfflineConfig, say: Say) -> None:
    """Make all optimizer steps of a run, and write the model."""
    examples = data.train
    steps = with_steps(config, len(examples)).max_steps
    checkpoints = RunCheckpoints(engine, config)
    first = _resume(checkpoints, config, say)

    save_dtype = getattr(torch, config.save_dtype)
    evaluations = Evaluations(engine, config, save_dtype)
    evaluations.resume(first)

    def evaluate(step: int, rows: list[TrainingRow] | None) -> bool:
        """Evaluate the current weights, and print the results; return whether training ends."""
        if data.held_out is None and not config.evaluation:
            return False
        if evaluations.was_made(step):
            return evaluations.ended(step)
        began = perf_counter()
        said, loss = "", None
        if data.held_out is not None:
            held = every_row(data.held_out, engine.ranks)
            metrics = engine.eval_batch(held, training.loss, training.weight, whole_groups=training.whole_groups)
            loss = metrics.loss
            said = f" loss {loss:.4f}{_written(training.figures(metrics.sums))}"
        if config.evaluation or config.keep_best:
            checkpoints.require_fit(step, save_dtype, rows=rows)
        played, ends = evaluations.take(step, loss)
        tally.leave_out(perf_counter() - began)
        say(f"{'evaluated' if loss is None else 'held out'} after {step} steps:{said}{played}")
        return ends

    tally = _Tally(training)
    start = perf_counter()
    rows: list[TrainingRow] | None = None
    done = first
    drawn = batches(examples, config.batch_size, config.seed, engine.ranks, first=first)
    with doing("train", steps, "steps", before=first) as shown:
        for step, batch in shown.count(zip(range(first, steps), drawn)):  # noqa: B905  batches never end
            if (step % config.eval_every == 0 if config.eval_every else step == 0) and evaluate(step, rows):
                break
            rows, engine.budget.halved = batch, False  # the previous batch may have run out of memory
            metrics = engine.train_batch(rows, training.loss, training.weight, whole_groups=training.whole_groups)
            if metrics.skipped:  # the cause is this batch, or the weights that the previous step made
                checkpoints.require_fit(step, rows=rows)
            tally.add(metrics)
            done = step + 1
            if done % config.log_every == 0 or done == steps:
                say(f"step {done:>{len(str(steps))}}/{steps}  {tally.progress()}")
            checkpoints.after(done)
    checkpoints.require_fit(done, save_dtype, rows=rows)
    evaluate(done, None)
    seconds = perf_counter() - start - tally.left_out_s
    checkpoints.before_export()
    with doing(f"write {config.output}"):
        evaluations.export()
    checkpoints.remove()
    dropped = f" ({examples.dropped_long} more were too long)" if examples.dropped_long else ""
    say(
        f"{config.output}: {done} steps on {len(examples)} {config.EXAMPLES}{dropped}, "
        f"{tally.tokens:,} tokens ({tally.learned_tokens:,} learned) in {seconds:.1f} s = "
        f"{tally.tokens / seconds:,.0f} tokens/s, final loss {tally.final_loss():.4f}{evaluations.summary()}"
    )


class _Tally:
    """Totals of the steps so far, and of the steps since the last line of progress."""

    def __init__(self, training: Training) -> None:
        self._figures = training.figures
        self._losses: list[float] = []
        self._learning_rate = 0.0
        self._sums: Counter[str] = Counter()
        self._reported, self._reported_losses, self._reported_tokens = perf_counter(), 0, 0
        self.tokens = self.learned_tokens = self.skipped = 0
        self.left_out_s = 0.0

    def leave_out(self, seconds: float) -> None:
        """Leave the time of an evaluation out of the speed."""
        self._reported += seconds
        self.left_out_s += seconds

    def add(self, metrics: StepMetrics) -> None:
        self._losses.append(metrics.loss)
        self._learning_rate = metrics.learning_rate
        # Sums add up over steps; maxima do not.
        self._sums.update({name: value for name, value in metrics.sums.items() if not name.startswith("max_")})
        self.skipped += metrics.skipped
        self.tokens += metrics.tokens
        self.learned_tokens += metrics.loss_tokens

    def progress(self) -> str:
        """Return the means since the last report, the learning rate, and the tokens of the data per second, prompts included."""
        now = perf_counter()
        recent = self._losses[self._reported_losses :]
        speed = (self.tokens - self._reported_tokens) / (now - self._reported)
        line = f"loss {sum(recent) / len(recent):.4f}{_written(self._figures(self._sums))}  "
        line += f"lr {self._learning_rate:.2e}  {speed:,.0f} tokens/s"
        self._reported, self._reported_losses, self._reported_tokens = now, len(self._losses), self.tokens
        self._sums.clear()
        return f"{line}  skipped {self.skipped}" if self.skipped else line

    def final_loss(self) -> float:
        """Return the mean of the last tenth of the steps that this process made; NaN if it made none."""
        last = self._losses[-max(1, len(self._losses) // 10) :]
        return sum(last) / len(last) if last else math.nan


def _written(figures: Mapping[str, float]) -> str:
    return "".join(f"  {name} {value:.4f}" for name, value in figures.items())
