"""The four kinds of offline training, each from its settings to a model directory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Protocol

from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from sluice.config import ConfigError, reason_of
from sluice.render import ChatRenderer
from trainer_svc.compute_config import LoraConfig
from trainer_svc.config import ObjectiveConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.engine.network import Head
from trainer_svc.objectives.objective import Objective
from trainer_svc.offline.batches import Data, Examples, hold_out, precompute_logprobs
from trainer_svc.offline.checkpoints import claim_output
from trainer_svc.offline.config import DistillConfig, DpoConfig, OfflineConfig, RewardModelConfig, SftConfig
from trainer_svc.offline.examples import Demonstrations, Preferences, ScoredAnswers
from trainer_svc.offline.loop import Report, Summary, train, with_length
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
from trainer_svc.offline.rows import DataError
from trainer_svc.parallel.mesh import SINGLE, Mesh

__all__ = ["distill", "fine_tune", "prefer", "run", "train_scorer"]


def run(config: OfflineConfig, report: Report, mesh: Mesh = SINGLE) -> Summary:
    """Train and write the model.

    Args:
        config: The settings; their class says which kind of training it is.
        report: Called every `log_every` steps and with each evaluation of held-out examples.
        mesh: The processes that train together.

    Raises:
        FinishedError: if the run is to be resumed and has finished.
        FileExistsError: if the output directory exists; nothing is trained then.
        DataError: if the examples cannot be used.
        ConfigError: if the model does not load, or the settings do not fit.
    """
    match config:
        case SftConfig():
            return fine_tune(config, report, mesh)
        case DpoConfig():
            return prefer(config, report, mesh)
        case RewardModelConfig():
            return train_scorer(config, report, mesh)
        case DistillConfig():
            return distill(config, report, mesh)
    raise TypeError(f"there is no offline training for {type(config).__name__}")


def fine_tune(config: SftConfig, report: Report, mesh: Mesh = SINGLE) -> Summary:
    """Train a model on demonstrations. Arguments and errors are those of `run`."""
    data = load_examples(config, Demonstrations.load, renderer_of(config))
    engine = build_engine(with_length(config, len(data.train)), mesh=mesh)
    objective = Objective.of(ObjectiveConfig(preset="sft"))
    training = Training(objective.loss, objective.weight)
    return train(engine, training, data, config, report)


def prefer(config: DpoConfig, report: Report, mesh: Mesh = SINGLE) -> Summary:
    """Train a model on preferences (DPO, IPO). Arguments and errors are those of `run`."""
    data = load_examples(config, Preferences.load, renderer_of(config))
    engine = build_engine(with_length(config, len(data.train)), mesh=mesh)

    def with_reference(examples: Examples) -> Examples:
        return precompute_logprobs(engine, examples, "reference_logprobs")

    data = replace(data, train=with_reference(data.train), held_out=data.held_out and with_reference(data.held_out))
    training = Training(PreferenceLoss(config), count_pairs, preference_figures, whole_groups=True)
    return train(engine, training, data, config, report)


def train_scorer(config: RewardModelConfig, report: Report, mesh: Mesh = SINGLE) -> Summary:
    """Train a sequence classifier with one label on preferences. Arguments and errors are those of `run`."""
    renderer = renderer_of(config)
    padding = AutoConfig.from_pretrained(config.model).get_text_config().pad_token_id
    if padding is None:
        padding = renderer.tokenizer.pad_token_id

    def load(data: str, split: str, renderer: ChatRenderer, *, max_length: int, drop_long: bool) -> ScoredAnswers:
        pairs = Preferences.load(data, split, renderer, max_length=max_length, drop_long=drop_long)
        return ScoredAnswers(pairs, padding)

    data = load_examples(config, load, renderer)
    engine = build_engine(with_length(config, len(data.train)), head="value", mesh=mesh)
    # transformers finds the last token of a padded batch by it, and refuses batches where it is not set.
    engine.network.model.config.get_text_config().pad_token_id = padding
    training = Training(ScoreLoss(config.centering), count_pairs, score_figures, whole_groups=True)
    return train(engine, training, data, config, report)


def distill(config: DistillConfig, report: Report, mesh: Mesh = SINGLE) -> Summary:
    """Train a model on a teacher's log-probabilities. Arguments and errors are those of `run`; the teacher must have the model's vocabulary."""
    renderer = renderer_of(config)
    _check_vocabulary(config, renderer.tokenizer)
    data = load_examples(config, Demonstrations.load, renderer)
    settings = with_length(config, len(data.train))
    data = _taught(settings, data, mesh)
    loss = TeacherLoss(config.divergence)
    return train(
        build_engine(settings, mesh=mesh), Training(loss, loss.objective.weight, teacher_figures), data, config, report
    )


def _taught(config: DistillConfig, data: Data, mesh: Mesh) -> Data:
    """Return the data with the teacher's log-probabilities. The teacher's memory is free when this returns."""
    teacher = build_engine(config.model_copy(update={"lora": LoraConfig()}), config.teacher, mesh=mesh, frozen=True)

    def with_teacher(examples: Examples) -> Examples:
        return precompute_logprobs(teacher, examples, "teacher_logprobs")

    return replace(data, train=with_teacher(data.train), held_out=data.held_out and with_teacher(data.held_out))


def _check_vocabulary(config: DistillConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    teacher = tokenizer_of(config.teacher, "teacher")
    if teacher.get_vocab() != tokenizer.get_vocab():
        raise DataError(
            f"the teacher {config.teacher} has another vocabulary than {config.model}: choose models with one tokenizer"
        )


class Loaded(Examples, Protocol):
    """Examples as read from files."""

    @property
    def dropped_long(self) -> int:
        """Examples that were dropped as too long."""
        ...


class Load(Protocol):
    """A function that reads one kind of examples."""

    def __call__(self, data: str, split: str, renderer: ChatRenderer, *, max_length: int, drop_long: bool) -> Loaded:
        """Read and render all rows; `DataError` if they cannot be used."""
        ...


def renderer_of(config: OfflineConfig) -> ChatRenderer:
    """Claim the output, then return the renderer of the model's tokenizer.

    Raises:
        FinishedError, FileExistsError: as `claim_output`.
        ConfigError: if the directory above the output cannot be made, or the model has no tokenizer that loads.
    """
    claim_output(config)
    return ChatRenderer(tokenizer_of(config.model, "model"))


def tokenizer_of(model: str, setting: str) -> PreTrainedTokenizerBase:
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


def load_examples(config: OfflineConfig, load: Load, renderer: ChatRenderer) -> Data:
    """Read the examples to train on and those held out.

    Args:
        config: The settings.
        load: Reads one kind of examples.
        renderer: Renders them.

    Raises:
        DataError: if they cannot be used.
    """
    read = partial(load, renderer=renderer, max_length=config.max_length, drop_long=config.on_long == "drop")
    data = read(config.data, config.split)
    if config.eval_data:
        held_out = read(config.eval_data, config.eval_split)
        return Data(data, held_out, data.dropped_long)
    return Data(*hold_out(data, config.eval_share, config.seed), data.dropped_long)


def build_engine(
    config: OfflineConfig, model: str = "", *, head: Head = "language", mesh: Mesh = SINGLE, frozen: bool = False
) -> TrainEngine:
    """Load the engine of this process.

    Args:
        config: The settings, with the number of steps filled in.
        model: Directory or hub id to load; empty for the model to start from.
        head: Head of the network: "language", "value" or "both".
        mesh: The processes that train together.
        frozen: Whether the model only computes.

    Raises:
        ConfigError: if the model does not load, or the settings do not fit it, the device or the processes.
    """
    try:
        return TrainEngine(
            config, model or config.model, config.seed, head=head, mesh=mesh, frozen="auto" if frozen else None
        )
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot load the model {model or config.model}: {reason_of(error)}") from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except RuntimeError as error:
        if "mismatched_sizes" not in str(error):
            raise
        raise ConfigError(
            f"cannot load the model {model or config.model}: its weights have other shapes than its config.json says: give the"
            " directory of a whole model"
        ) from error
