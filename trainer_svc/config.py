"""Settings of the trainer. Imports neither torch nor transformers, so that `--help` is quick."""

from __future__ import annotations

import math
import os
import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from sluice.chat_template import check_chat_template
from sluice.config import CommonConfig, ConfigError, Section, ServerConfig
from sluice.config.allocation import Allocation
from sluice.config.decide import least_sample, smallest_memory, visible_devices
from sluice.config.footprint import GIB, USABLE, Footprint, most_that_fit
from sluice.config.schema import check_repeatable, not_repeatable
from sluice.config.tables import FrozenModelTable, TrainerDeadlinesTable, TrainerTable, rollout_of
from sluice.decoder import Decoder, decoder_of
from sluice.models import check_files, check_model, importable, sizes_on_disk
from trainer_svc.compute_config import ComputeConfig, OptimizerConfig, check_decay, check_sizes, on_device, processes_of
from trainer_svc.memory import BFLOAT16, FLOAT32, Decisions, Memory, estimate, fit, host_bytes
from trainer_svc.objectives.config import ObjectiveConfig, ResolvedObjective
from trainer_svc.objectives.presets import PRESETS
from trainer_svc.precision import Precision, chosen_precision, frozen_precision

BASE = "base"
"""In place of the path of a model: use the model that the run starts from."""

IN_BATCH = "batch"
"""In place of the path of a model: load none, because every trajectory brings the model's log-probabilities."""

RL_PRESETS = [name for name, preset in PRESETS.items() if preset.needs_behaviour]


class FrozenConfig(FrozenModelTable):
    """A model that is not trained."""

    dtype: Precision = Field(
        "auto",
        description="Precision of the model's matrices in memory: 4 or 2 bytes per parameter. bfloat16 needs `trainer.dtype` bfloat16. auto: bfloat16 if the device is CUDA and `trainer.dtype` is bfloat16, else float32.",
    )


class ReferenceConfig(FrozenConfig):
    """The frozen policy that a KL term pulls towards."""

    model: str = Field(
        "",
        description="`base`: the model that the run starts from. Or a Hugging Face directory or hub id. `batch`: no model; every trajectory brings `ref_logprobs`. A model costs one forward pass per batch. Empty: no reference.",
    )


class TeacherConfig(FrozenConfig):
    """The model that `objective.preset = distill` follows."""

    model: str = Field(
        "",
        description="A Hugging Face directory or hub id; the model must have the policy's tokenizer. `batch`: no model; every trajectory brings `teacher_logprobs`. A model costs one forward pass per batch. Empty: no teacher.",
    )


class CriticConfig(OptimizerConfig):
    """The critic of `advantage = gae` and how it is optimised."""

    lr: float = Field(1e-5, ge=0, description="Peak learning rate of a critic that has its own model.")
    model: str = Field(
        "base",
        description="`base`: the model that the run starts from, with a value head in place of its language head. Or a Hugging Face directory or hub id; the model must have the same tokenizer.",
    )
    shared: bool = Field(
        False,
        description="Put the value head on the policy's network. This saves the critic's memory and forward pass. The policy's optimizer then trains it, and of this table only `shared_coef` is read.",
    )
    shared_coef: float = Field(
        0.5,
        ge=0,
        description="Weight of the value loss, which is added to the policy's loss. Only for `shared = true`.",
    )
    freeze_policy_steps: int = Field(
        0,
        ge=0,
        description="Critic warm-up: optimizer steps that the critic makes before the policy makes its first. A batch that begins during the warm-up trains only the critic; the version that it produces has the policy's weights unchanged.",
    )

    @model_validator(mode="after")
    def _warms_up_alone(self) -> Self:
        if self.shared and self.freeze_policy_steps:
            raise ValueError(
                "a shared critic is part of the policy's network and cannot learn before it: set freeze_policy_steps to 0, or shared to false"
            )
        return self

    _decay_has_an_end = model_validator(mode="after")(check_decay)


class CheckpointConfig(Section):
    """When checkpoints are written and how many stay."""

    every_steps: int = Field(0, ge=0, description="Write a checkpoint every this many batches. 0: only on request.")
    keep: int = Field(
        2,
        ge=2,
        description="Complete checkpoints to keep on disk. At least 2, so that one is complete while the next is written.",
    )


class DeadlinesConfig(TrainerDeadlinesTable):
    """How long an operation may take before the trainer reports a failure."""

    load_s: float = Field(600.0, gt=0, description="Seconds to load the model or a checkpoint.")
    step_s: float = Field(1800.0, gt=0, description="Seconds for one training step.")
    push_s: float = Field(600.0, gt=0, description="Seconds to push one version to weight sync, retries included.")
    save_s: float = Field(1800.0, gt=0, description="Seconds to write one checkpoint.")
    submit_s: float = Field(
        120.0, gt=0, description="Seconds that a SubmitBatch stream may take from its header to its end."
    )


class PublishConfig(Section):
    """How new weights travel to weight sync."""

    encoding: Literal["auto", "dense"] = Field(
        "auto",
        description="auto: send the exact difference from the previous version, or whole tensors if the difference has more than half their bytes. After such a version the comparison is skipped for 1, then 2, 4 and up to 16 versions. dense: always send whole tensors.",
    )
    local: bool = Field(
        True,
        description="Hand weights to a weight service on the same host as files in /dev/shm, if /dev/shm has room for four copies. Otherwise, and for other hosts, send them by socket.",
    )


class TrainerConfig(ComputeConfig, TrainerTable):
    """The table `[trainer]`."""

    backend: str | None = Field(
        None,
        description="The trainer's part of `allocation_mode`, such as `fsdp:d4t2`. Sets `parallel`. none: leave `parallel` as it is.",
    )
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig, description="The loss to minimise.")
    objectives: dict[str, ObjectiveConfig] = Field(
        default_factory=dict,
        description="Further objectives by name, for the trajectories of environments whose `objective` names one. Each has its own divisor, and the losses add up.",
    )
    epochs: int = Field(1, ge=1, description="Passes over each batch.")
    minibatches: int = Field(
        1,
        ge=1,
        description="Optimizer steps per epoch. A batch is cut into this many parts of whole groups with about equally many loss tokens. A batch still produces one version.",
    )
    critic: CriticConfig = Field(default_factory=CriticConfig, description="The critic, for the advantage gae.")
    reference: ReferenceConfig = Field(default_factory=ReferenceConfig, description="The frozen policy of a KL term.")
    teacher: TeacherConfig = Field(default_factory=TeacherConfig, description="The teacher of distillation.")
    publish_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Precision of published weights. auto: the precision that the rollout engine computes in (`rollout.dtype`).",
    )
    publish: PublishConfig = Field(default_factory=PublishConfig, description="How new weights travel to weight sync.")
    max_skipped_steps: int = Field(
        5,
        ge=1,
        description="Stop training after this many batches in a row with a skipped optimizer step. A step is skipped if its loss or gradient is not finite.",
    )
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Checkpoints.")
    deadlines: DeadlinesConfig = Field(default_factory=DeadlinesConfig, description="Deadlines.")
    server: ServerConfig = Field(
        default_factory=lambda: ServerConfig(port=7102), description="Where the trainer listens."
    )

    @field_validator("backend")
    @classmethod
    def _is_a_trainer(cls, text: str | None) -> str | None:
        if text is not None:
            Allocation.parse_roles({"trainer": text})
        return text

    _decay_has_an_end = model_validator(mode="after")(check_decay)

    @model_validator(mode="after")
    def _has_what_the_objective_reads(self) -> Self:
        for each in self.all_objectives.values():
            self._check_models_of(each)
        objective = self.objective.resolved
        if objective.needs_critic and not self.critic.shared and not self.critic.model:
            raise ValueError(
                "advantage gae needs the values of a critic: set critic.model to base or a directory, set critic.shared to true,"
                " or choose an objective whose advantages need no critic"
            )
        offloaded = self.optimizer_offload is True and self.critic.optimizer == "muon" and not self.critic.shared
        if objective.needs_critic and offloaded:
            raise ValueError(
                "optimizer_offload also applies to the critic and does not support Muon: set critic.optimizer to adamw, or"
                " optimizer_offload to false"
            )
        return self

    def _check_models_of(self, objective: ResolvedObjective) -> None:
        if not objective.needs_behaviour and not objective.needs_teacher:
            raise ValueError(
                f"objective {objective.name} needs demonstrations: use `sluice sft`, or one of {', '.join(RL_PRESETS)}"
            )
        if objective.needs_reference and not self.reference.model:
            raise ValueError(
                f"objective {objective.name} has a KL term of weight {objective.kl_coef:g} but there is no reference policy: set"
                " reference.model to base (or to batch, if every trajectory brings ref_logprobs), or objective.kl_coef to 0"
            )
        if objective.needs_teacher and not self.teacher.model:
            raise ValueError(
                f"objective {objective.name} needs a teacher: set teacher.model to its directory, or to batch if every"
                " trajectory brings teacher_logprobs"
            )

    @model_validator(mode="after")
    def _mixes_only_losses(self) -> Self:
        """Refuse several objectives if one of them estimates advantages over the whole batch."""
        estimating = [f"objectives.{name}" for name, each in self.objectives.items() if each.resolved.runs_estimator]
        if self.objectives and self.objective.resolved.runs_estimator:
            estimating = ["objective", *estimating]
        if estimating:
            raise ValueError(
                f"{estimating[0]} lets the trainer estimate advantages, which it does for a whole batch: use it without the table"
                " objectives, or choose objectives whose advantages come from rewards alone"
            )
        for name in self.objectives:
            if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
                raise ValueError(f"objective name {name!r}: use lower-case letters, digits, `_` and `-`")
        return self

    @property
    def all_objectives(self) -> dict[str, ResolvedObjective]:
        """All objectives by the name that trajectories give; "" stands for trajectories that name none."""
        return {"": self.objective.resolved} | {name: each.resolved for name, each in self.objectives.items()}

    @property
    def dead_clips(self) -> tuple[str, ...]:
        """Warnings of objectives whose bounds have no effect with these settings."""
        steps = self.epochs * self.minibatches
        found = {name: each.dead_clip(steps) for name, each in self.all_objectives.items()}
        return tuple(
            f"trainer.{f'objectives.{name}' if name else 'objective'}: {warning}"
            for name, warning in found.items()
            if warning
        )

    @model_validator(mode="after")
    def _has_nothing_that_the_objective_does_not_read(self) -> Self:
        objective, others = self.objective.resolved, self.all_objectives.values()
        if not any(each.needs_reference for each in others) and self.reference != ReferenceConfig():
            raise ValueError(
                f"the reference policy is read by a KL term, and objective {objective.name} has none: remove the table reference,"
                " or set objective.kl_coef above 0"
            )
        if not any(each.needs_teacher for each in others) and self.teacher != TeacherConfig():
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

    def processes(self) -> int:
        """Return the number of ranks: the product of the axes. `dp_shard = -1` counts as 1, since no other setting has the number."""
        axes = self.parallel
        return math.prod((axes.dp_replicate, max(1, axes.dp_shard), axes.tp, axes.cp, axes.pp))

    def repeatable(self) -> Self:
        """Return a copy with the values that a deterministic run needs; see `Section.repeatable`."""
        if self.processes() > 1:
            raise not_repeatable("trainer.parallel", f"{self.processes()} processes", "one process")
        check_repeatable(self, "trainer.threads", 1)
        return self.model_copy(update={"threads": 1})

    def models_beside(self) -> dict[str, str]:
        """The models that reference, teacher and critic name, except for the run's own model, by setting."""
        named = {f"trainer.{name}.model": getattr(self, name).model for name in ("reference", "teacher", "critic")}
        return {setting: model for setting, model in named.items() if model not in ("", BASE, IN_BATCH)}

    def check_start(self, run: CommonConfig) -> tuple[str, ...]:
        """Refuse settings that would make the trainer fail while it loads; see `Section.check_start`.

        Raises:
            ConfigError: if a model is missing or cannot be split as `parallel` says, a step does not fit on a device, `compile`
                lacks a compiler, or the module of a custom objective is missing.
        """
        models = {"model": run.model, **self.models_beside()}
        for setting, model in models.items():
            check_model(model, setting)
        self.check_trainable(run)
        for setting, model in models.items():
            check_files(model, setting, tokenizer=setting == "model")
        check_chat_template(run.model, run.chat_template, run.chat_template_kwargs)
        self.check_compiler()
        for setting, objective in {"objective": self.objective, **self.objectives}.items():
            module, separator, _ = objective.preset.partition(":")
            if separator and not importable(module):
                where = setting if setting == "objective" else f"objectives.{setting}"
                raise ConfigError(
                    f"trainer.{where}.preset: there is no module {module!r}: install it, or add its directory to PYTHONPATH"
                )
        return *self.dead_clips, *self._check_memory(run)

    def check_trainable(self, run: CommonConfig) -> None:
        """Refuse models that cannot be split as `parallel` says, or cannot be adapted; see `Section.check_trainable`."""
        adapted = ("model", "trainer.critic.model")
        for setting, model in {"model": run.model, **self.models_beside()}.items():
            check_sizes(model, setting, self.parallel, self.lora if setting in adapted else None)

    def _check_memory(self, run: CommonConfig) -> tuple[str, ...]:
        """Refuse settings with which a training step does not fit in a device's memory; return lines with the estimate."""
        on_cuda = self.device != "cpu" and bool(visible_devices(os.environ))
        memory = smallest_memory() if on_cuda else None
        held = self.footprint(run, cuda=on_cuda)
        if held is None:
            return ()
        held.check(memory)
        return (f"memory of one trainer device, estimated: {held.device / GIB:.1f} GiB ({held.parts})",)

    def longest_sample(self, run: CommonConfig, *, cuda: bool, memory: int | None) -> int | None:
        """Return the most tokens of a row that fit in a device's memory; see `Section.longest_sample`."""
        sizes, capacity = sizes_on_disk(run.model), self._capacity(memory if self._on(cuda=cuda) == "cuda" else None)
        if capacity is None or sizes is None or not sizes.positions:
            return None

        def needed(tokens: int) -> float:
            held = self._step(run, cuda=cuda, longest=tokens)
            return 0.0 if held is None else held.total

        if not capacity < needed(sizes.positions):
            return None
        return most_that_fit(needed, sizes.positions, capacity)

    def _capacity(self, memory: int | None) -> float | None:
        """Return the bytes of a device that training may use. `memory` is the size of its whole memory, None if unknown."""
        if self.device_memory_gb is not None:
            return self.device_memory_gb * 1e9
        return None if memory is None else memory * USABLE

    def _on(self, *, cuda: bool) -> str:
        """Return the kind of the trainer's device."""
        return self.device if self.device != "auto" else "cuda" if cuda else "cpu"

    def _step(
        self, run: CommonConfig, *, cuda: bool, compute: ComputeConfig | None = None, longest: int | None = None
    ) -> Memory | None:
        """Estimate a training step; None for a hub id, or for a model without an estimate.

        Args:
            run: The settings of the run.
            cuda: As for `footprint`.
            compute: Settings in place of these.
            longest: Tokens of the longest row; None: the limit in the settings.

        Raises:
            ConfigError: if the axes of `parallel` contradict the number of processes.
        """
        sizes = decoder_of(run.model)
        if sizes is None:
            return None
        device = self._on(cuda=cuda)
        dtype = on_device(self, device).dtype
        frozen: list[tuple[Decoder, int]] = []
        for table in (self.reference, self.teacher):
            found = (
                None if table.model in ("", IN_BATCH) else decoder_of(run.model if table.model == BASE else table.model)
            )
            if found is not None:
                frozen.append(
                    (found, BFLOAT16 if frozen_precision(table.dtype, dtype, device) == "bfloat16" else FLOAT32)
                )
        critic = None
        if self.has_critic_of_its_own:
            found = decoder_of(run.model if self.critic.model == BASE else self.critic.model)
            critic = None if found is None else (found, self.for_critic(compute or self))
        try:
            return estimate(
                sizes,
                compute or self,
                device=device,
                processes=processes_of(self.parallel),
                longest=_longest_row(run) if longest is None else longest,
                frozen=frozen,
                critic=critic,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def has_critic_of_its_own(self) -> bool:
        """Whether a critic with its own model is trained."""
        return self.objective.resolved.needs_critic and not self.critic.shared

    def for_critic(self, compute: ComputeConfig) -> ComputeConfig:
        """Return the settings of a critic with its own model: `compute` with the critic's optimizer."""
        computing = {name: getattr(compute, name) for name in ComputeConfig.model_fields}
        return ComputeConfig(**computing | {name: getattr(self.critic, name) for name in OptimizerConfig.model_fields})

    def fitted(self, run: CommonConfig, *, cuda: bool, memory: int | None) -> Decisions:
        """Decide `parallel.accumulate` and `optimizer_offload` by the memory of a device; see `Section.fitted`.

        Raises:
            ConfigError: if the axes of `parallel` contradict the number of processes.
        """
        if decoder_of(run.model) is None:
            return {}
        axes = self.parallel
        shards = processes_of(self.parallel) // (axes.dp_replicate * axes.tp * axes.pp)

        def needed(compute: ComputeConfig) -> Memory:
            held = self._step(run, cuda=cuda, compute=compute)
            if held is None:
                raise AssertionError("the model's sizes are known")
            return held

        # Muon cannot step on the CPU, and the setting applies to a critic, too. So here it counts as off; each engine decides for itself.
        muon = self.has_critic_of_its_own and self.critic.optimizer == "muon" and self.optimizer_offload == "auto"
        config = self.model_copy(update={"optimizer_offload": False}) if muon else self
        return fit(config, needed, self._capacity(memory), device=self._on(cuda=cuda), shards=shards)

    def _savings(self, *, cuda: bool) -> str:
        """Return a text that names the memory-saving settings which are still off."""
        used = on_device(self, self._on(cuda=cuda))
        offloads = used.optimizer_offload is True or used.optimizer == "muon" or self._on(cuda=cuda) == "cpu"
        free = {"gradient_checkpointing": used.gradient_checkpointing is True, "optimizer_offload": offloads}
        names = [name for name, taken in free.items() if not taken]
        return f"set {' or '.join(names)}, " if names else ""

    def footprint(self, run: CommonConfig, *, cuda: bool) -> Footprint | None:
        """Estimate the memory of a training step; None for a hub id, or for a model without an estimate.

        Raises:
            ConfigError: if the axes of `parallel` contradict the number of processes.
        """
        sizes, held = decoder_of(run.model), self._step(run, cuda=cuda)
        if sizes is None or held is None:
            return None
        device = self._on(cuda=cuda)
        published = FLOAT32 if chosen_precision(self.publish_dtype, device) == "float32" else BFLOAT16
        exact = self.device_memory_gb is not None or device == "cpu"
        return Footprint(
            what="a training step",
            device=held.total,
            parts=str(held),
            host=0,
            host_of_process=host_bytes(sizes, self, processes=processes_of(self.parallel), published=published),
            remedy=f"lower token_budget or rollout.max_model_len, {self._savings(cuda=cuda)}train an adapter (lora.rank), or shard the model over"
            " more devices (parallel.dp_shard)",
            share=1.0 if exact else USABLE,
            capacity=None if self.device_memory_gb is None else self.device_memory_gb * 1e9,
        )


def _longest_row(run: CommonConfig) -> int:
    """Return the most tokens of a row that the replicas' settings allow. If they set no limit, one prompt and response of the run."""
    rollout = rollout_of(run)
    given = None if rollout is None else rollout.engine_args.get("max_model_len") or rollout.max_model_len
    return given if isinstance(given, int) else least_sample(run)


CONFIG = TrainerConfig
