"""The networks of one trainer: policy and critic, which learn; reference and teacher, which do not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import structlog

from trainer_svc.compute_config import ComputeConfig, LoraConfig, OptimizerConfig
from trainer_svc.config import BASE, IN_BATCH, TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.objectives.objective import Objective
from trainer_svc.parallel.mesh import SINGLE, Mesh
from trainer_svc.update.critic import Critic
from trainer_svc.update.policy import Passes, PolicyUpdate

__all__ = ["FrozenModels", "TrainedModels", "policy_update"]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TrainedModels:
    """The networks that optimizers change and checkpoints hold.

    Attributes:
        policy: The policy; with a second head for values if the critic shares its network.
        critic: The critic's own network, if it has one.
    """

    policy: TrainEngine
    critic: TrainEngine | None = None

    @classmethod
    def load(cls, config: TrainerConfig, model: str | Path, seed: int = 0, *, mesh: Mesh = SINGLE) -> Self:
        """Load them as they are before the first step.

        Args:
            config: The trainer's settings.
            model: Hugging Face directory or hub id that the run starts from.
            seed: Seed of PyTorch's generators; it draws the weights of a value head.
            mesh: The processes that train together.

        Raises:
            ValueError: if a model cannot be trained packed, or not have a value head.
        """
        needs_critic = config.objective.resolved.needs_critic
        shared = needs_critic and config.critic.shared
        critic = None
        if needs_critic and not shared:
            source = model if config.critic.model == BASE else config.critic.model
            critic = TrainEngine(_critic_config(config), source, seed, head="value", mesh=mesh)
        return cls(TrainEngine(config, model, seed, head="both" if shared else "language", mesh=mesh), critic)

    @property
    def by_name(self) -> dict[str, TrainEngine]:
        """The loaded networks by name, the policy first."""
        return {"policy": self.policy} | ({} if self.critic is None else {"critic": self.critic})


@dataclass(frozen=True, slots=True)
class FrozenModels:
    """Models that only compute log-probabilities: each takes 4 bytes per parameter (2 in bfloat16), and nothing for an optimizer.

    Attributes:
        reference: The policy that a KL term pulls towards.
        teacher: The model that distillation follows.
    """

    reference: TrainEngine | None = None
    teacher: TrainEngine | None = None

    @classmethod
    def load(cls, config: TrainerConfig, model: str | Path, *, mesh: Mesh = SINGLE) -> Self:
        """Load the models that the objective reads, unless the batches bring their log-probabilities.

        Args:
            config: The trainer's settings.
            model: Hugging Face directory or hub id that the run starts from.
            mesh: The processes that train together.

        Raises:
            ValueError: if a model cannot compute packed rows.
        """
        objective = Objective.of(config.objective)
        named = {
            "reference": config.reference.model if objective.resolved.needs_reference else "",
            "teacher": config.teacher.model if objective.resolved.needs_teacher else "",
        }
        engines = {
            name: _frozen(config, model if source == BASE else source, name, mesh)
            for name, source in named.items()
            if source not in ("", IN_BATCH)
        }
        return cls(**engines)


def policy_update(config: TrainerConfig, trained: TrainedModels, frozen: FrozenModels, seed: int = 0) -> PolicyUpdate:
    """Return the update that trains these models on a batch.

    Args:
        config: The trainer's settings.
        trained: The policy and its critic.
        frozen: The models beside them.
        seed: Decides which groups share a minibatch.
    """
    objective = Objective.of(config.objective)
    critic = None
    if objective.resolved.needs_critic:
        clip = objective.resolved.other_parameters.get("value_clip")
        settings = config.critic
        critic = Critic(trained.critic or trained.policy, clip, settings.shared_coef, settings.freeze_policy_steps)
    return PolicyUpdate(
        trained.policy,
        objective,
        Passes(config.epochs, config.minibatches, seed),
        critic=critic,
        reference=frozen.reference,
        teacher=frozen.teacher,
    )


def _critic_config(config: TrainerConfig) -> ComputeConfig:
    """Return the trainer's compute settings with the critic's optimizer."""
    computing = {name: getattr(config, name) for name in ComputeConfig.model_fields}
    return ComputeConfig(**computing | {name: getattr(config.critic, name) for name in OptimizerConfig.model_fields})


def _frozen(config: TrainerConfig, source: str | Path, name: str, mesh: Mesh) -> TrainEngine:
    # An optimizer that is never stepped holds nothing; the other kinds set memory aside.
    settings = config.model_copy(update={"optimizer": "adamw", "optimizer_offload": False, "lora": LoraConfig()})
    engine = TrainEngine(settings, source, head="language", mesh=mesh, frozen=getattr(config, name).dtype)
    weights = list(engine.network.model.parameters())
    log.info(
        "frozen model loaded",
        use=name,
        model=str(source),
        parameters=sum(each.numel() for each in weights),
        gib=round(sum(each.numel() * each.element_size() for each in weights) / 2**30, 3),
    )
    return engine
