"""Settings of offline training: `sluice sft`, `dpo`, `reward-model`, `distill`. Imports neither torch nor transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from sluice.config import CHAT_TEMPLATE, CHAT_TEMPLATE_KWARGS, ConfigError, TemplateArguments
from sluice.environments.datasets import ENDINGS, kind, parts
from trainer_svc.compute_config import ComputeConfig, check_decay

LOSS = "loss"
"""The metric that every run with held-out examples has."""

_SET_BY_THE_RUN = ("model", "weights_dir", "steps", "url", "baseline", "address", "output", "plot", "attempts")
"""Settings of `sluice eval` that must not be set for an evaluation inside of an offline run."""


class OfflineConfig(ComputeConfig):
    """The settings that all kinds of offline training share. The file is flat: its keys stand at the top level."""

    EXAMPLES: ClassVar[str] = "pairs"
    """The word for the examples in the last line of output."""

    model: str = Field("", description="Model to start from: a Hugging Face directory or hub id.")
    chat_template: Path | None = Field(None, description=f"{CHAT_TEMPLATE} It is written with the model.")
    chat_template_kwargs: TemplateArguments = Field(
        default_factory=dict,
        description=f"{CHAT_TEMPLATE_KWARGS} Serve the model with the same ones: its directory does not have them.",
    )
    data: str | list[str] = Field(
        "",
        description="Examples: a file (JSONL, JSON, CSV, Parquet, Arrow), a dataset directory or a hub dataset id, also with a revision (`owner/name@revision`). Several are read one after the other, or mixed if each has a share (`a.jsonl=0.7,b.parquet=0.3`).",
    )
    split: str = Field("train", description="Split of `data`, if it is a dataset; a file has none.")
    output: Path = Field(Path("outputs/offline"), description="Model directory to write; must not exist.")
    batch_size: int = Field(64, ge=1, le=1 << 20, description="Examples per optimizer step.")
    epochs: float = Field(1.0, gt=0, description="Passes over the data; ignored if `max_steps` is set.")
    max_length: int = Field(4096, ge=2, description="Longest example in tokens; see `on_long`.")
    on_long: Literal["error", "drop"] = Field(
        "error", description="Longer examples: error stops the run, drop leaves them out and counts them."
    )
    eval_data: str | list[str] = Field(
        "", description="Held-out examples, in the form of `data`, to report the loss on; empty: see `eval_share`."
    )
    eval_split: str = Field("test", description="Split of `eval_data`, if it is a dataset.")
    eval_share: float = Field(
        0.0, ge=0, lt=1, description="Share of `data` to hold out if `eval_data` is empty; 0: none."
    )
    eval_every: int = Field(
        0, ge=0, description="Optimizer steps between two evaluations; 0: before and after training."
    )
    evaluation: dict[str, Any] = Field(
        default_factory=dict,
        description="Settings of `sluice eval`, such as environment, prompts and samples: it plays the environment with the current weights at each evaluation, by the transformers engine unless `engine` is set. Empty: the loss on held-out examples alone.",
    )
    metric: str = Field(
        LOSS,
        description="Result by which evaluations are compared: loss, of the held-out examples, or one of `evaluation`, such as reward_mean or greedy_exact_share; of several environments the mean.",
    )
    keep_best: bool = Field(
        False,
        description="Keep the model of the best evaluation in `OUTPUT.checkpoints/best`, and write it in place of the last step's.",
    )
    patience: int = Field(
        0, ge=0, description="Evaluations in a row without a better result after which training ends; 0: it does not."
    )
    min_gain: float = Field(0.0, ge=0, description="By how much a result must be better than the best one to count.")
    checkpoint_every: int = Field(
        0, ge=0, description="Optimizer steps between two checkpoints in `OUTPUT.checkpoints`; 0: no checkpoints."
    )
    resume: bool = Field(
        False,
        description="Resume from the newest checkpoint, with the settings and the data of the run that wrote it. Without a checkpoint, start from the beginning and say so.",
    )
    seed: int = Field(0, ge=0, description="Seed for the order of the data and for new weights.")
    log_every: int = Field(20, ge=1, description="Optimizer steps between two lines of progress.")
    save_dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="Precision of the written weights."
    )
    lr: float = Field(1e-5, ge=0, description="Peak learning rate, per step.")

    @field_validator("data", "eval_data", mode="before")
    @classmethod
    def _name_of_one(cls, data: object) -> object:
        """Return the only element of a list, because a flag is read as a list."""
        return data[0] if isinstance(data, list) and len(data) == 1 else data or ""

    @field_validator("data", "eval_data")
    @classmethod
    def _shares(cls, data: str | list[str]) -> str | list[str]:
        """Refuse a list of data sets whose shares are not valid for a mixture."""
        if data:
            try:
                parts(data)
            except ConfigError as error:
                raise ValueError(str(error)) from error
        return data

    @model_validator(mode="after")
    def _complete(self) -> Self:
        for name in ("model", "data"):
            if not getattr(self, name):
                raise ValueError(f"{name} is not set: give --{name}, or {name} = ... in the file")
        if self.parallel.pp > 1:
            raise ValueError("offline training writes the model from one pipeline stage: set parallel.pp to 1")
        if "eval_split" in self.model_fields_set and not self.eval_data:
            raise ValueError("eval_split selects a split of eval_data, which is not set: remove it, or set eval_data")
        if self.max_steps:
            check_decay(self)
        if self.eval_data and self.eval_share:
            raise ValueError(
                "eval_data and eval_share are both set, and only one can define the held-out examples: remove one"
            )
        self._check_evaluations()
        return self

    @property
    def compares(self) -> bool:
        """Whether evaluations are compared with each other."""
        return self.keep_best or self.patience > 0

    def _check_evaluations(self) -> None:
        if given := [name for name in _SET_BY_THE_RUN if name in self.evaluation]:
            raise ValueError(f"evaluation.{given[0]} is not for an evaluation inside of a run: remove it")
        if self.metric != LOSS and not self.evaluation:
            raise ValueError(f"metric {self.metric} is a result of an environment: set evaluation, or metric to {LOSS}")
        if self.compares and self.metric == LOSS and not (self.eval_data or self.eval_share):
            raise ValueError(
                "keep_best and patience compare the loss of held-out examples: set eval_data or eval_share, or metric to a result of"
                " evaluation"
            )
        if self.patience and not self.eval_every:
            raise ValueError("patience counts evaluations between steps: set eval_every")


class SftConfig(OfflineConfig):
    """Supervised fine-tuning; the file is flat: its keys stand at the top level."""

    EXAMPLES = "demonstrations"

    data: str | list[str] = Field(
        "",
        description="Demonstrations: a file (JSONL, JSON, CSV, Parquet, Arrow), a dataset directory or a hub dataset id, or several, with rows of `messages`, or of `prompt` and "
        "`completion` (texts are joined as they are; lists of messages are rendered as a chat).",
    )
    output: Path = Field(Path("outputs/sft"), description="Model directory to write; must not exist.")
    learn_roles: list[str] = Field(
        ["assistant"],
        min_length=1,
        description="Roles whose messages are learned, such as assistant and tool. Fields of a message (`weight`, `loss`, `train`) say otherwise for it. Every role must be in the data.",
    )


PAIRS = (
    "Pairs of answers: a file (JSONL, JSON, CSV, Parquet, Arrow), a dataset directory or a hub dataset id, or several, with rows of `prompt`, `chosen` and `rejected`"
    " (texts are joined as they are; lists of messages are rendered as a chat, with `tools` if given)."
)


class DpoConfig(OfflineConfig):
    """Training on preferences; the file is flat: its keys stand at the top level.

    The reference is the model to start from. Its log-probabilities are computed once, before the first step.
    """

    data: str | list[str] = Field("", description=PAIRS)
    output: Path = Field(Path("outputs/dpo"), description="Model directory to write; must not exist.")
    lr: float = Field(1e-6, ge=0, description="Peak learning rate, per step.")
    objective: Literal["dpo", "ipo"] = Field(
        "dpo",
        description="A gain is log t - log ref of an answer. dpo: -log sigmoid of beta times the difference of gains; ipo: squared distance of the difference per token from 1 / (2 beta).",
    )
    beta: float = Field(
        0.1, gt=0, description="Reward per nat of gain; larger values keep the policy closer to the reference."
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="dpo: share of pairs whose labels are assumed to be swapped."
    )
    sft_weight: float = Field(
        0.0, ge=0, description="Weight of the mean negative log-likelihood of the chosen answer's tokens; 0: none."
    )

    @model_validator(mode="after")
    def _fits_objective(self) -> Self:
        if self.objective == "ipo" and self.label_smoothing:
            raise ValueError("objective ipo has no label_smoothing: remove it, or set objective to dpo")
        return self


class RewardModelConfig(OfflineConfig):
    """Training a scorer on preferences (Bradley-Terry); the file is flat: its keys stand at the top level.

    The output is a transformers sequence classifier with one label, which scores the last token.
    """

    data: str | list[str] = Field("", description=PAIRS)
    output: Path = Field(Path("outputs/reward_model"), description="Model directory to write; must not exist.")
    centering: float = Field(
        0.0,
        ge=0,
        description="Weight of the squared sum of a pair's scores, which pulls the mean score to 0; 0.01 is usual, 0: off.",
    )

    @model_validator(mode="after")
    def _plays_nothing(self) -> Self:
        if self.evaluation:
            raise ValueError("a reward model plays no environment: remove evaluation")
        return self


class DistillConfig(OfflineConfig):
    """Distillation from a teacher on given texts; the file is flat: its keys stand at the top level.

    The teacher's log-probabilities of the texts are computed once, before the first step; both models have one vocabulary.
    """

    EXAMPLES = "texts"

    data: str | list[str] = Field(
        "",
        description="Texts, as rows of `sluice sft`: sampled from the teacher (`divergence = forward`) or from the model to start from "
        "(`divergence = reverse`).",
    )
    output: Path = Field(Path("outputs/distill"), description="Model directory to write; must not exist.")
    teacher: str = Field("", description="The model to learn from: a Hugging Face directory or hub id.")
    divergence: Literal["forward", "reverse"] = Field(
        "forward",
        description="forward: negative log-likelihood of the teacher's texts, whose gradient is that of KL(teacher || model); "
        "reverse: on the model's own texts, the gradient of KL(model || teacher).",
    )

    @model_validator(mode="after")
    def _has_teacher(self) -> Self:
        if not self.teacher:
            raise ValueError("teacher is not set: give --teacher, or teacher = ... in the file")
        return self


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(@[\w./-]+)?")


def is_file(data: str) -> bool:
    """Return whether the data is a file, which has no splits, rather than a dataset.

    Raises:
        ConfigError: if `data` is neither a readable file, nor a directory, nor has the form of a hub id.
    """
    path = Path(data)
    if path.is_file():
        if kind(path) is None:
            raise ConfigError(f"{path} is a file of an unknown kind: its name must end with {', '.join(ENDINGS)}")
        return True
    if not path.exists() and (kind(path) or path.suffix in {".txt", ".gz"} or not _HUB_ID.fullmatch(data)):
        raise ConfigError(f"there is no file {path.resolve()}, and {data!r} is not a hub dataset id such as owner/name")
    return False


def make_parent(output: Path) -> None:
    """Create the directory above an output, before anything is loaded for it.

    Raises:
        ConfigError: if it cannot be created.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output: cannot write into {output.parent}: {error.strerror}; choose another directory"
        ) from error
