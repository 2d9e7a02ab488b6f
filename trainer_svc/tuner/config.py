"""Settings of the tuner. Imports neither torch nor transformers."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from sluice.chat_template import check_chat_template
from sluice.config import CommonConfig, ConfigError, Section, ServerConfig
from sluice.models import check_model
from trainer_svc.compute_config import ComputeConfig, LoraConfig, check_sizes


class LimitsConfig(Section):
    """How much callers may have."""

    trainings: int = Field(
        16, ge=1, description="Most trainings at a time. Each takes 16 bytes of memory per weight of its factors."
    )
    per_principal: int = Field(8, ge=1, description="Most trainings of one principal at a time.")
    idle_s: float = Field(
        3600.0,
        gt=0,
        description="Seconds without an operation after which a training is saved under the name `idle` and deleted.",
    )
    states: int = Field(64, ge=1, description="Most saved states of one principal.")


class DeadlinesConfig(Section):
    """Seconds that a step may take before it fails."""

    load_s: float = Field(600.0, gt=0, description="Loading the base model.")
    operation_s: float = Field(
        600.0,
        gt=0,
        description="One operation: gradients, a step, saving or loading, a request to a replica. Publishing an adapter, and loading it into a replica, has 120 s.",
    )


class TunerConfig(ComputeConfig):
    """The tuner: trains adapters of one base model, each for a caller with a loop of its own (TrainingService)."""

    server: ServerConfig = Field(default_factory=lambda: ServerConfig(port=7108), description="Where it listens.")
    lora: LoraConfig = Field(
        default_factory=lambda: LoraConfig(rank=16, alpha=32.0), description="The adapters, the same for all callers."
    )
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="How much callers may have.")
    deadlines: DeadlinesConfig = Field(default_factory=DeadlinesConfig, description="Deadlines.")

    @model_validator(mode="after")
    def _shares_one_engine(self) -> Self:
        if not self.lora.rank:
            raise ValueError("lora.rank is 0, but the tuner trains adapters alone: set it to 1 or more")
        if self.lora.dropout:
            raise ValueError("lora.dropout draws random numbers that trainings would share: set it to 0")
        if self.optimizer != "adamw":
            raise ValueError(f"optimizer is {self.optimizer}, but adapters are trained by adamw: remove the setting")
        if self.optimizer_offload is True:
            raise ValueError("optimizer_offload is for whole models: set it to false")
        if self.schedule != "constant" or self.warmup_steps:
            raise ValueError("each OptimStep names its learning rate: remove schedule and warmup_steps")
        return self

    def processes(self) -> int:
        """Return the number of processes that compute."""
        return 1

    def check_start(self, run: CommonConfig) -> None:
        """Refuse settings that would make the tuner fail at start.

        Raises:
            ConfigError: with what to change.
        """
        if not run.model:
            raise ConfigError("model is not set: name the base model, a Hugging Face directory or hub id")
        check_model(run.model)
        self.check_trainable(run)
        check_chat_template(run.model, run.chat_template, run.chat_template_kwargs)

    def check_trainable(self, run: CommonConfig) -> None:
        """Refuse a base model that cannot be adapted; see `Section.check_trainable`."""
        check_sizes(run.model, "model", self.parallel, self.lora)


CONFIG = TunerConfig
