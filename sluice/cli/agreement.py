"""Whether the tables of a run's services fit each other: what one gives and the other would refuse, or wait for in vain.

A package that is not ours may serve a table, with settings of its own: what it does not have is not looked at.
"""

from __future__ import annotations

from typing import Any

from sluice.advantages import check_sides
from sluice.config import ConfigError, RunConfig

__all__ = ["check_agreement"]

OWN_WORKFLOWS = {"auto", "single_turn", "multi_turn"}
"""Workflows whose trajectories are known; others may bring more."""

IN_BATCH = "batch"
"""Where a trainer's table names no model, since trajectories bring its log-probabilities."""


def check_agreement(config: RunConfig) -> None:
    """Refuse services that would not work together.

    Raises:
        ConfigError: with the settings of both sides, and the remedy.
    """
    _check_adapters(config)
    _check_estimators(config)
    _check_columns(config)


def _check_adapters(config: RunConfig) -> None:
    """Refuse a trainer whose versions no replica would serve."""
    trained = getattr(config.section("trainer"), "lora", None)
    served = getattr(config.section("rollout"), "lora", None)
    if trained is None or served is None or not trained.rank or trained.merge is True:
        return
    if not served.enabled or served.max_rank < trained.rank:
        raise ConfigError(
            f"trainer.lora.rank = {trained.rank} publishes adapters, which the replicas would refuse: set rollout.lora.enabled = true"
            f" and rollout.lora.max_rank = {trained.rank} or higher, or trainer.lora.merge = true to publish whole weights"
        )


def _check_estimators(config: RunConfig) -> None:
    """Refuse advantages that are estimated on both sides, or on none."""
    choices = _choices(config)
    advantage = getattr(config.section("orchestrator"), "advantage", None)
    if choices is None or advantage is None:
        return
    try:
        check_sides(advantage, choices.advantage if choices.runs_estimator else "")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if advantage == "none" and choices.advantage:
        raise ConfigError(
            f"orchestrator.advantage is none, but objective {choices.name} reads advantages: set it to {choices.advantage}, or"
            " choose another trainer.objective"
        )


def _check_columns(config: RunConfig) -> None:
    """Refuse a trainer that waits for log-probabilities which the orchestrator's own workflows do not bring."""
    trainer = config.section("trainer")
    if getattr(config.section("orchestrator"), "workflow", None) not in OWN_WORKFLOWS:
        return
    for name in ("reference", "teacher"):
        if getattr(getattr(trainer, name, None), "model", "") == IN_BATCH:
            raise ConfigError(
                f"trainer.{name}.model is {IN_BATCH}, but trajectories of this run's workflow bring no log-probabilities of a {name}: set"
                f" it to a model, or orchestrator.workflow to one of your own that brings them"
            )


def _choices(config: RunConfig) -> Any:  # noqa: ANN401 - a property of a package that this one does not import
    """What the trainer's objective consists of; None where its package has none."""
    return getattr(getattr(config.section("trainer"), "objective", None), "choices", None)
