"""Settings of the trainer. Imports neither torch nor transformers, so that `--help` is quick."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from sluice.config import CommonConfig, ConfigError, Section, ServerConfig
from sluice.config.allocation import Allocation
from sluice.models import importable
from trainer_svc.compute_config import (
    ComputeConfig,
    OptimizerConfig,
    Precision,
    check_decay,
    frozen_precision,
    on_device,
)
from trainer_svc.objectives.config import CorrectionConfig, ObjectiveConfig
from trainer_svc.objectives.presets import PRESETS
from trainer_svc.start_check import check_compiler, check_memory, check_models

__all__ = [
    "BASE",
    "CONFIG",
    "IN_BATCH",
    "CheckpointConfig",
    "CorrectionConfig",
    "CriticConfig",
    "DeadlinesConfig",
    "ObjectiveConfig",
    "PublishConfig",
    "ReferenceConfig",
    "TeacherConfig",
    "TrainerConfig",
]

BASE = "base"
"""Names the model that the run starts from, where another one could stand."""

IN_BATCH = "batch"
"""Names no model: every trajectory brings its log-probabilities."""

RL_PRESETS = [name for name, preset in PRESETS.items() if preset.needs_behaviour]


class ReferenceConfig(Section):
    """The frozen policy that a KL term pulls towards."""

    model: str = Field(
        "",
        description="`base`: the model that the run starts from; a Hugging Face directory or hub id; or `batch`: every trajectory brings ref_logprobs. A model takes one forward pass per batch. Empty: none.",
    )
    dtype: Precision = Field(
        "auto",
        description="Precision in which a model's matrices are kept: 4 or 2 bytes per parameter. bfloat16 needs `trainer.dtype` bfloat16, in which they are computed anyhow. auto: bfloat16 on CUDA where `trainer.dtype` is, else float32.",
    )


class TeacherConfig(Section):
    """The model that `objective.preset = distill` follows."""

    model: str = Field(
        "",
        description="A Hugging Face directory or hub id with the policy's tokenizer; or `batch`: every trajectory brings teacher_logprobs. A model takes one forward pass per batch. Empty: none.",
    )
    dtype: Precision = Field(
        "auto",
        description="Precision in which a model's matrices are kept: 4 or 2 bytes per parameter. bfloat16 needs `trainer.dtype` bfloat16, in which they are computed anyhow. auto: bfloat16 on CUDA where `trainer.dtype` is, else float32.",
    )


class CriticConfig(OptimizerConfig):
    """The critic of `advantage = gae` and how it is optimised."""

    lr: float = Field(1e-5, ge=0, description="Peak learning rate of a critic with a model of its own, per step.")
    model: str = Field(
        "base",
        description="`base`: the model that the run starts from, with a value for each token in place of its logits; or another Hugging Face directory or hub id with the same tokenizer.",
    )
    shared: bool = Field(
        False,
        description="Put the value head on the policy's own network, which saves the critic's memory and forward pass; then the policy's optimizer trains it, and `model`, `lr` and the rest here are not read.",
    )
    shared_coef: float = Field(
        0.5, ge=0, description="Weight of the value loss beside the policy's loss; read with `shared = true`."
    )
    freeze_policy_steps: int = Field(
        0,
        ge=0,
        description="Critic warm-up: optimizer steps that the critic makes before the policy makes its first. A batch that begins within them trains the critic alone, and its version has the weights of the one before.",
    )

    @model_validator(mode="after")
    def _warms_up_alone(self) -> Self:
        if self.shared and self.freeze_policy_steps:
            raise ValueError(
                "a shared critic cannot learn before the policy, whose network it is on: set freeze_policy_steps to 0, or shared to false"
            )
        return self

    @model_validator(mode="after")
    def _decay_has_an_end(self) -> Self:
        check_decay(self)
        return self


class CheckpointConfig(Section):
    """When checkpoints are written and how many stay."""

    every_steps: int = Field(0, ge=0, description="Batches between two checkpoints; 0 writes them on request only.")
    keep: int = Field(
        2,
        ge=2,
        description="Complete checkpoints that stay on disk; at least 2, so that one is whole while the next is written.",
    )


class DeadlinesConfig(Section):
    """How long the trainer waits before it calls something failed."""

    load_s: float = Field(600.0, gt=0, description="Seconds to load the model or a checkpoint.")
    step_s: float = Field(1800.0, gt=0, description="Seconds for one training step.")
    push_s: float = Field(600.0, gt=0, description="Seconds to push one version to weight sync, retry included.")
    save_s: float = Field(1800.0, gt=0, description="Seconds to write one checkpoint.")
    submit_s: float = Field(
        120.0, gt=0, description="Seconds that a SubmitBatch stream may take from its header to its end."
    )


class PublishConfig(Section):
    """How new weights travel to weight sync."""

    encoding: Literal["auto", "dense"] = Field(
        "auto",
        description="auto: the exact difference from the version before, or whole tensors where that has more than half the bytes (after which comparing is left out for 1, 2, 4 and up to 16 versions); dense: always whole tensors.",
    )
    local: bool = Field(
        True,
        description="Whether weights are handed to a weight service of the same host as files in /dev/shm, where four copies fit into it; otherwise, and to other hosts, they go by socket.",
    )


class TrainerConfig(ComputeConfig):
    """The table `[trainer]`."""

    backend: str | None = Field(
        None,
        description="This side of `allocation_mode` alone, such as `fsdp:d4t2`; sets `parallel`. none: `parallel` as it is.",
    )
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig, description="What is minimised.")
    epochs: int = Field(1, ge=1, description="Times that each batch is gone through.")
    minibatches: int = Field(
        1,
        ge=1,
        description="Optimizer steps per epoch: a batch is cut into as many parts, of whole groups and about equally many loss tokens. A version is still one per batch.",
    )
    critic: CriticConfig = Field(default_factory=CriticConfig, description="The critic, where the advantage is gae.")
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig, description="The frozen policy of a KL term.")
    teacher: TeacherConfig = Field(default_factory=TeacherConfig, description="The teacher of distillation.")
    publish_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Precision of published weights. auto: the engine's (`rollout.dtype`)."
    )
    publish: PublishConfig = Field(default_factory=PublishConfig, description="How new weights travel to weight sync.")
    queue_batches: int = Field(
        2, ge=1, description="Batches that may wait; more are refused with a delay to retry after."
    )
    max_skipped_steps: int = Field(
        5,
        ge=1,
        description="The trainer reports itself failed after this many batches in a row with a skipped optimizer step: one whose loss or gradient is not finite.",
    )
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Checkpoints.")
    deadlines: DeadlinesConfig = Field(
        default_factory=DeadlinesConfig, description="Deadlines of the trainer's own work."
    )
    server: ServerConfig = Field(
        default_factory=lambda: ServerConfig(port=7102), description="Where the trainer listens."
    )

    @field_validator("backend")
    @classmethod
    def _is_a_trainer(cls, text: str | None) -> str | None:
        if text is not None:
            Allocation.parse_roles({"trainer": text})
        return text

    @model_validator(mode="after")
    def _decay_has_an_end(self) -> Self:
        check_decay(self)
        return self

    @model_validator(mode="after")
    def _trains_on_samples(self) -> Self:
        if not self.objective.resolved.needs_behaviour and not self.objective.resolved.needs_teacher:
            raise ValueError(
                f"objective {self.objective.preset} needs demonstrations: use `sluice sft`, or one of {', '.join(RL_PRESETS)}"
            )
        return self

    @model_validator(mode="after")
    def _has_what_the_objective_reads(self) -> Self:
        objective = self.objective.resolved
        if objective.needs_reference and not self.reference.model:
            raise ValueError(
                f"objective {objective.name} has a KL term of weight {objective.kl_coef:g} but there is no reference policy: set reference.model to base"
                " (or to batch, if every trajectory brings ref_logprobs), or objective.kl_coef to 0"
            )
        if objective.needs_teacher and not self.teacher.model:
            raise ValueError(
                f"objective {objective.name} follows a teacher and none is named: set teacher.model to its directory, or to batch if every"
                " trajectory brings teacher_logprobs"
            )
        if objective.needs_critic and not self.critic.shared and not self.critic.model:
            raise ValueError(
                "advantage gae needs the values of a critic: set critic.model to base or a directory, critic.shared to true, or take an"
                " objective whose advantages need none"
            )
        offloaded = self.optimizer_offload and self.critic.optimizer == "muon" and not self.critic.shared
        if objective.needs_critic and offloaded:
            raise ValueError(
                "optimizer_offload holds for the critic too and cannot step its Muon: set critic.optimizer to adamw, or optimizer_offload to false"
            )
        return self

    @model_validator(mode="after")
    def _has_nothing_that_the_objective_does_not_read(self) -> Self:
        objective = self.objective.resolved
        if not objective.needs_reference and self.reference != ReferenceConfig():
            raise ValueError(
                f"the reference policy is read by a KL term, and objective {objective.name} has none: remove the table reference,"
                " or set objective.kl_coef above 0"
            )
        if not objective.needs_teacher and self.teacher != TeacherConfig():
            raise ValueError(
                f"the teacher is read by the objective distill, and this one is {objective.name}: remove the table teacher,"
                " or set objective.preset to distill"
            )
        if not objective.needs_critic and self.critic != CriticConfig():
            raise ValueError(
                f"the critic is read by the advantage gae, and objective {objective.name} has {objective.advantage or 'none'}: remove the table critic,"
                " or set objective.preset to ppo"
            )
        return self

    def models_beside(self) -> dict[str, str]:
        """Reference, teacher and critic, where they are models of their own."""
        named = {f"trainer.{name}.model": getattr(self, name).model for name in ("reference", "teacher", "critic")}
        return {setting: model for setting, model in named.items() if model not in ("", BASE, IN_BATCH)}

    def check_start(self, run: CommonConfig) -> tuple[str, ...]:
        """Refuse settings that would make the trainer fail while it loads; see `Section.check_start`.

        Raises:
            ConfigError: if a model is not there or cannot be shared out as `parallel` says, a step does not fit on a device, there
                is no compiler for `compile`, or the module of an objective of the user's own is not there.
        """
        check_models({"model": run.model, **self.models_beside()}, self.parallel)
        check_compiler(self)
        module, separator, _ = self.objective.preset.partition(":")
        if separator and not importable(module):
            raise ConfigError(
                f"trainer.objective.preset: there is no module {module!r}: install it, or put its directory on PYTHONPATH"
            )
        return check_memory(run.model, self, frozen=self._frozen_bytes(run.model), critic=self._own_critic(run.model))

    def _frozen_bytes(self, base: str) -> dict[str, int]:
        """Bytes of one weight of each model that only computes, by its directory."""
        resolved = on_device(self, "cuda" if self.device != "cpu" else "cpu")
        widths = {"float32": 4, "bfloat16": 2}
        return {
            base if table.model == BASE else table.model: widths[
                frozen_precision(table.dtype, resolved.dtype, self.device if self.device != "auto" else "cuda")
            ]
            for table in (self.reference, self.teacher)
            if table.model not in ("", IN_BATCH)
        }

    def _own_critic(self, base: str) -> str:
        """Directory of the critic's own model; empty without one."""
        if not self.objective.resolved.needs_critic or self.critic.shared:
            return ""
        return base if self.critic.model == BASE else self.critic.model


CONFIG = TrainerConfig
